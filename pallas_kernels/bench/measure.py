"""Verifies and times contenders on workloads that share their pools."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels.bench.contenders import BOUNDS, CONTENDERS, OPERATIONS, limit_operands, limit_step, make_step
from pallas_kernels.bench.report import Reporter
from pallas_kernels.bench.timing import median_seconds, wall_seconds
from pallas_kernels.bench.vllm import VllmKernels, VllmPools
from pallas_kernels.bench.workload import Workload, into_refs
from pallas_kernels.config import KernelConfig

# Requests that copy when a result is compared with the oracle, a loop over every byte of NumPy arrays.
_VERIFIED_COPIES = 4


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
      model, layout, tp, operation, num_reqs, copying, offset, paired: the workload.
      conv_only: whether the model has no temporal state.
      contender: who ran it.
      num_ctas: thread blocks that ours was held to; None for as many as it likes.
      seconds: time of a step, by `timing.METHODS`.
      wall_seconds: time of a step with launch and host; None where not asked for.
      bytes: bytes read plus bytes written.
      kernels: kernels that a step launches; 0 when not on a GPU.
    """

    model: str
    conv_only: bool
    layout: str
    tp: int
    operation: str
    num_reqs: int
    copying: int
    offset: int
    paired: bool
    contender: str
    num_ctas: int | None
    seconds: float
    wall_seconds: float | None
    bytes: int
    kernels: int

    @classmethod
    def of(
        cls,
        workload: Workload,
        contender: str,
        seconds: float,
        *,
        kernels: int,
        num_ctas: int | None = None,
        wall_seconds: float | None = None,
    ) -> "Row":
        """A measurement of `workload`."""
        return cls(
            model=workload.model.name,
            conv_only=workload.model.temporal_shape is None,
            layout=workload.layout,
            tp=workload.tp,
            operation=workload.operation,
            num_reqs=workload.num_reqs,
            copying=workload.num_copying,
            offset=workload.offset,
            paired=workload.paired,
            contender=contender,
            num_ctas=num_ctas,
            seconds=seconds,
            wall_seconds=wall_seconds,
            bytes=workload.bytes_moved,
            kernels=kernels,
        )


class WrongResultError(RuntimeError):
    """A contender's bytes differ from the oracle's."""


class Bench:
    """One run: what has been measured so far, and what only needs doing once."""

    def __init__(self, reporter: Reporter, *, iterations: int, vllm: VllmKernels | None = None) -> None:
        self.reporter, self.iterations, self.vllm = reporter, iterations, vllm
        self.rows: list[Row] = []
        self._verified: set[tuple[Any, ...]] = set()
        self._limits: dict[int, tuple[float, int]] = {}

    def measure(
        self,
        workloads: Sequence[Workload],
        contenders: Sequence[str],
        config: KernelConfig | None = None,
        *,
        wall: bool = False,
    ) -> list[Row]:
        """Measures every contender on every workload.

        Args:
          workloads: of one model, layout and tensor-parallel degree, so that they share their pools.
          contenders: names of `CONTENDERS`.
          config: tuning knobs of our kernel.
          wall: also take the wall time of each step.

        Returns:
          The rows, which are also appended to `rows`.

        Raises:
          WrongResultError: a contender gives another result than the oracle.
        """
        config = config or KernelConfig()
        contenders = [name for name in CONTENDERS if name in contenders]
        for name in contenders:
            if name not in BOUNDS:
                for workload in workloads:
                    self._verify(name, workload, config)
        first = len(self.rows)
        if "limit" in contenders:
            for workload in workloads:
                if workload.num_copying:
                    self._append("limit", workload, config, *self._limit(workload.bytes_moved), None)
        states = max(workloads, key=lambda workload: workload.num_blocks).states()
        if "vllm" in contenders:
            assert self.vllm is not None
            pools = VllmPools(self.vllm, states, workloads[0].layout)
            for workload in workloads:
                self._time("vllm", workload, config, pools.step(workload), (), wall)
            del pools
        refs = into_refs(states)
        for workload in workloads:
            for name in contenders:
                if name not in ("limit", "vllm"):
                    step = make_step(name, workload, config)
                    self._time(name, workload, config, step, (refs, *workload.arguments()), wall)
        return self.rows[first:]

    def _limit(self, num_bytes: int) -> tuple[float, int]:
        """Times the elementwise copy of `num_bytes`, once a run."""
        if num_bytes not in self._limits:
            self.reporter.progress(f"limit of {num_bytes / 2**20:.0f} MiB")
            step, operands = limit_step(), limit_operands(num_bytes)
            jax.block_until_ready(step(*operands))
            self._limits[num_bytes] = median_seconds(step, *operands, iterations=self.iterations)
        return self._limits[num_bytes]

    def _time(self, name: str, workload: Workload, config: KernelConfig, step: Any, operands: Any, wall: bool) -> None:
        self.reporter.progress(f"{workload.model.name} {workload.layout} {workload.num_copying} copying: {name}")
        jax.block_until_ready(step(*operands))
        seconds, kernels = median_seconds(step, *operands, iterations=self.iterations)
        whole = wall_seconds(step, *operands, iterations=self.iterations) if wall else None
        self._append(name, workload, config, seconds, kernels, whole)

    def _append(
        self, name: str, workload: Workload, config: KernelConfig, seconds: float, kernels: int, wall: float | None
    ) -> None:
        num_ctas = config.num_ctas if name == "mosaic_gpu" else None
        row = Row.of(workload, name, seconds, kernels=kernels, num_ctas=num_ctas, wall_seconds=wall)
        self.rows.append(row)
        self.reporter.row(row, self.rows)

    def _verify(self, name: str, workload: Workload, config: KernelConfig) -> None:
        """Compares with the oracle, once for all numbers of copying requests."""
        key = (name, config, dataclasses.replace(workload, num_copying=0))
        if key in self._verified:
            return
        self._verified.add(key)
        small = dataclasses.replace(workload, num_copying=min(workload.num_reqs, _VERIFIED_COPIES))
        self.reporter.progress(f"{workload.model.name} {workload.layout}: verifying {name}")
        if not is_right(name, small, config, self.vllm):
            raise WrongResultError(f"{name} gives a WRONG result on {small}")


def is_right(name: str, workload: Workload, config: KernelConfig, vllm: VllmKernels | None = None) -> bool:
    """Compares every byte of two layers' pools with the oracle."""
    states, arguments = workload.states(num_layers=2), workload.arguments()
    before = jax.tree.map(np.array, states)
    if name == "vllm":
        assert vllm is not None
        pools = VllmPools(vllm, states, workload.layout)
        jax.block_until_ready(pools.step(workload)())
        # Not through JAX, which may hold on to what it knew of its arrays.
        got = [tensor.cpu().contiguous().view(vllm.torch.uint8).numpy() for tensor in pools.tensors]
    else:
        refs = into_refs(states)
        make_step(name, workload, config)(refs, *arguments)
        got = [np.asarray(ref[...]) for ref in jax.tree.leaves(refs)]
    reference = OPERATIONS[workload.operation][1](
        before, *jax.tree.map(np.asarray, arguments), **workload.static_options
    )
    want = jax.tree.leaves(reference if workload.operation == "copy" else reference[0])
    return all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(got, want, strict=True))
