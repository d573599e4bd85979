"""How long a step takes: kernel time on a GPU, wall time elsewhere."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

METHODS = {"gpu": "kernel time from CUPTI, median", "cpu": "wall time, median"}


def method() -> str:
    """How `median_seconds` times on this machine, for every contender alike."""
    return METHODS.get(jax.devices()[0].platform, METHODS["cpu"])


def median_seconds(step: Callable[..., Any], *operands: Any, iterations: int) -> tuple[float, int]:
    """Times calls of a step that has run before.

    Args:
      step: a jitted function, or a `vllm.Launch`.
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
