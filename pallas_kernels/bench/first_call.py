"""What the first call of a step costs: tracing, lowering and compiling."""

import dataclasses
import itertools
import time
from typing import Any

import jax

from layouts import MambaState
from pallas_kernels.bench.contenders import OPERATIONS
from pallas_kernels.bench.workload import Workload
from pallas_kernels.config import KernelConfig

_NUM_BLOCKS = 64


@dataclasses.dataclass(frozen=True)
class FirstCall:
    """Seconds on the host before a step first runs.

    Attributes:
      model: whose states.
      num_layers: of how many layers; each has its own arrays unless they are stacked.
      stacked: whether all layers share one array of each kind.
      implementation: "mosaic_gpu" or "xla".
      trace_seconds: Python to jaxpr.
      lower_seconds: jaxpr to what the compiler takes, the kernel's code included.
      compile_seconds: the compiler.
    """

    model: str
    num_layers: int
    stacked: bool
    implementation: str
    trace_seconds: float
    lower_seconds: float
    compile_seconds: float

    @property
    def seconds(self) -> float:
        """All three."""
        return self.trace_seconds + self.lower_seconds + self.compile_seconds

    def __str__(self) -> str:
        arrays = "stacked" if self.stacked else "separate arrays"
        return (
            f"first call of {self.implementation}, {self.num_layers} layers, {arrays}: {self.seconds:.2f} s "
            f"(trace {self.trace_seconds:.2f}, lower {self.lower_seconds:.2f}, compile {self.compile_seconds:.2f})"
        )


def first_call(
    workload: Workload, num_layers: int, *, stacked: bool, implementation: str, config: KernelConfig
) -> FirstCall:
    """Traces, lowers and compiles a step of `workload` on donated arrays, with nothing cached; no pool is allocated."""
    run, _ = OPERATIONS[workload.operation]
    lead = (num_layers, _NUM_BLOCKS) if stacked else (_NUM_BLOCKS,)
    conv, *temporal = (jax.ShapeDtypeStruct((*lead, *block.shape), block.dtype) for block in workload.blocks)
    state = MambaState(conv=conv, temporal=temporal[0] if temporal else None, stacked=stacked)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), workload.arguments())

    def step(states: Any, *operands: Any) -> Any:
        return run(states, *operands, implementation=implementation, config=config, **workload.static_options)

    jax.clear_caches()
    times = [time.perf_counter()]
    traced = jax.jit(step, donate_argnums=0).trace([state] * (1 if stacked else num_layers), *arguments)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    trace, lower, compile_ = (after - before for before, after in itertools.pairwise(times))
    return FirstCall(workload.model.name, num_layers, stacked, implementation, trace, lower, compile_)
