"""What is static about a launch of the Mosaic GPU kernel: how rows are cut and dealt, and what memory that takes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.plan import Operation, View
from pallas_kernels.rows_mgpu import chunks_are_whole
from pallas_kernels.tiling import LANES, LINE_BYTES, PoolGroup, round_up

# Rows planned at once, at most: a longer batch is planned and copied in chunks.
_MAX_ROWS = 512
# Shared memory for the request vectors of a chunk, at most, unless the smallest chunk needs more.
_MAX_VECTOR_BYTES = 32 * 1024
# A row of fewer work items than this for each worker is dealt in runs. Longer ones lose by it: 88 instead of 94 % of
# the limit (qwen3.5-9b in SD, 32 of 128 requests copying, H200, JAX 0.11.2, 2026-11-30).
_SHORT_ROW_ITEMS = 4
# Shared memory of a thread block, less what barriers and reductions take.
_SHARED_BYTES = 225 * 1024


@dataclasses.dataclass(frozen=True)
class Launch:
    """Everything static about a launch.

    Attributes:
      operation: what to do.
      groups: the pools.
      views: the request vectors, in the order of the operation's values; behind them the slots, if mapped.
      mapped: whether rows find their slots through a mapping.
      num_rows: rows that are decided; those from `batch` on only keep their slot's values.
      batch: rows that can copy.
      null_block_id: id that is never copied from or to.
      num_ctas: size of the grid.
      most_warpgroups: warpgroups of a thread block, if their stages fit.
    """

    operation: Operation
    groups: tuple[PoolGroup, ...]
    views: tuple[View, ...]
    mapped: bool
    num_rows: int
    batch: int
    null_block_id: int | None
    num_ctas: int
    most_warpgroups: int

    @property
    def num_values(self) -> int:
        """Request vectors that the operation decides from."""
        return len(self.views) - self.mapped

    @property
    def chunk_rows(self) -> int:
        """Rows planned at once, a power of two for the binary search."""
        rows = min(max(1 << (self.num_rows - 1).bit_length(), LANES), _MAX_ROWS)
        # The item that a worker would take next is numbered, too, at the end.
        numbers = np.iinfo(np.int32).max - self.num_ctas * self.most_warpgroups
        if self.max_items * LANES > numbers:
            raise NotImplementedError(
                f"states cut a request into {self.max_items} tiles, and the kernel numbers at most {numbers // LANES}; "
                "implementation='xla' takes any"
            )
        most_rows = min(_MAX_VECTOR_BYTES // (4 * len(self.views)), numbers // self.max_items)
        while rows > max(most_rows, LANES):
            rows //= 2
        return rows

    @property
    def num_chunks(self) -> int:
        """Chunks of the batch."""
        return -(-self.num_rows // self.chunk_rows)

    @property
    def tables(self) -> tuple[int, ...]:
        """Block tables that some pool uses."""
        return tuple(sorted({group.pool.table for group in self.groups}))

    @property
    def dtypes(self) -> tuple[np.dtype, ...]:
        """Types of the pools."""
        return tuple(dict.fromkeys(group.pool.dtype for group in self.groups))

    @property
    def max_items(self) -> int:
        """Work items of one copying row, at most."""
        return sum(group.max_items for group in self.groups)

    def num_items(self, offset: jax.Array) -> jax.Array:
        """Work items of copying rows whose windows shift by `offset` tokens."""
        return jnp.asarray(sum(group.num_items(offset) for group in self.groups), jnp.int32)

    @property
    def stage_elements(self) -> dict[np.dtype, int]:
        """Elements of a warpgroup's stage for each type of the pools."""
        return {
            dtype: round_up(
                max(group.tiling.stage_elements for group in self.groups if group.pool.dtype == dtype),
                LINE_BYTES // dtype.itemsize,
            )
            for dtype in self.dtypes
        }

    @property
    def num_warpgroups(self) -> int:
        """Warpgroups of a thread block: as many as wanted, if their stages fit beside the request vectors."""
        vectors = len(self.views) + len(self.operation.updated) + 2
        vectors_bytes = 4 * vectors * (self.chunk_rows + LINE_BYTES // 4)
        stages_bytes = sum(elements * dtype.itemsize for dtype, elements in self.stage_elements.items())
        return max(min(self.most_warpgroups, (_SHARED_BYTES - vectors_bytes) // stages_bytes), 1)

    @property
    def num_workers(self) -> int:
        """Warpgroups of the grid."""
        return self.num_ctas * self.num_warpgroups

    @property
    def deals_runs(self) -> bool:
        """Whether each worker gets a run of neighbouring work items instead of one in every `num_workers`.

        Each worker plans every row that it meets. Where rows have few items, a run meets fewer rows. Long
        rows are faster dealt in turn, when all workers copy from the same blocks at a time. So are pools of
        several geometries, whose items take unlike times.
        """
        return len(self.groups) == 1 and self.max_items < _SHORT_ROW_ITEMS * self.num_workers

    @property
    def num_loads(self) -> int:
        """The most loads that a tile has in flight at once."""
        return max(group.tiling.num_loads for group in self.groups)

    @property
    def scratch_types(self) -> dict[str, Any]:
        """Shared memory and barriers of a thread block."""
        whole_chunks = chunks_are_whole(self.views, self.chunk_rows)
        return {
            # A vector may start inside a copy unit; a whole line more keeps the rows on lines.
            "rows_smem": plgpu.SMEM((len(self.views), self.chunk_rows + LINE_BYTES // 4), jnp.int32),
            "updates_smem": [plgpu.SMEM((self.chunk_rows,), jnp.int32) for _ in self.operation.updated],
            "items_smem": plgpu.SMEM((2 * self.chunk_rows,), jnp.int32),
            "stages_smem": [
                plgpu.SMEM((self.num_warpgroups, elements), dtype) for dtype, elements in self.stage_elements.items()
            ],
            # Every barrier costs time at launch: there is none that nothing waits for.
            "fetched": None if whole_chunks else plgpu.Barrier(num_arrivals=len(self.views)),
            "planned": plgpu.Barrier(),
            "copied": plgpu.Barrier(num_arrivals=self.num_warpgroups) if self.num_chunks > 1 else None,
            "loaded": plgpu.Barrier(num_arrivals=self.num_loads, num_barriers=self.num_warpgroups),
        }
