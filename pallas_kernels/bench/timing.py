"""How long a step takes: kernel time on a GPU, wall time elsewhere."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

METHODS = {"gpu": "kernel time from CUPTI, median", "cpu": "wall time, median"}


class Untraced(jax.stages.Wrapped):
    """A function that `profiler.measure` calls as it is.

    It would jit anything but a `jax.stages.Wrapped`, with all that it closes over as constants.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Wraps a function that launches what is to be timed."""
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self._function(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Refuses."""
        raise NotImplementedError("what is timed as it is cannot be traced")

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Refuses."""
        raise NotImplementedError("what is timed as it is cannot be lowered")


def method() -> str:
    """How `median_seconds` times on this machine, for every contender alike."""
    return METHODS.get(jax.devices()[0].platform, METHODS["cpu"])


def median_seconds(step: Callable[..., Any], *operands: Any, iterations: int) -> tuple[float, int]:
    """Times calls of a step that has run before.

    Args:
      step: a jitted function, or an `Untraced` one.
      *operands: what it is called with.
      iterations: calls to take the median of, at least 2.

    Returns:
      The median time, and how many kernels a call launches (0 when not on a GPU).

    Raises:
      RuntimeError: CUPTI sees no kernel.
    """
    if jax.devices()[0].platform != "gpu":
        return wall_seconds(step, *operands, iterations=iterations), 0
    from jax.experimental.mosaic.gpu import profiler

    _, runs = profiler.measure(step, aggregate=False, iterations=iterations)(*operands)
    if not runs:
        raise RuntimeError("CUPTI reports no kernel: another profiler may hold it")
    # Kernel times come in milliseconds. The first calls are slower.
    runs = runs[len(runs) // 4 :]
    return statistics.median(sum(ms for _, ms in run) for run in runs) / 1e3, len(runs[-1])


def wall_seconds(step: Callable[..., Any], *operands: Any, iterations: int) -> float:
    """Returns the median time from calling a step to its results, launch and host included."""
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        jax.block_until_ready(step(*operands))
        times.append(time.perf_counter() - start)
    return statistics.median(times)
