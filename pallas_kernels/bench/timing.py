"""How long a step takes: kernel time on a GPU, wall time elsewhere."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

METHODS = {"gpu": "kernel time, CUPTI, median", "cpu": "wall time, median"}


def median_seconds(step: Callable[..., Any], *operands: Any, iterations: int) -> tuple[float, int]:
    """Returns the median time of a call, and how many kernels it launches (0 when not on a GPU)."""
    jax.block_until_ready(step(*operands))
    if jax.devices()[0].platform == "gpu":
        from jax.experimental.mosaic.gpu import profiler

        _, runs = profiler.measure(step, aggregate=False, iterations=iterations)(*operands)
        # Kernel times come in milliseconds. The first calls are slower.
        runs = runs[len(runs) // 4 :]
        return statistics.median(sum(ms for _, ms in run) for run in runs) / 1e3, len(runs[-1])
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        jax.block_until_ready(step(*operands))
        times.append(time.perf_counter() - start)
    return statistics.median(times), 0
