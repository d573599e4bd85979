"""The Mosaic GPU kernel: one persistent launch plans the step and copies every layer.

In each thread block, one warpgroup decides the whole batch from the request vectors and numbers the
work items with a prefix sum in shared memory: one tile of one pool of one copying row each. They are
dealt to all warpgroups of the grid. Tiles travel by bulk asynchronous copies between global and shared
memory, which take any number of 16-byte units; only the strided shift of a conv window passes through
registers. Pools of equal geometry share the code of a tile and differ in a `lax.switch` over refs.

Dims: S = slots, R = rows of the batch, G = block tables, C = columns.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from layouts import ConvStateLayout
from pallas_kernels.config import KernelConfig
from pallas_kernels.plan import (
    BlockIds,
    Operation,
    Request,
    View,
    blocks_usable,
    guarded,
    window_moves,
)
from pallas_kernels.pools import Pool, StateKind
from pallas_kernels.rows_mgpu import (
    bring_rows,
    chunks_are_whole,
    collect_vectors,
    copy_vector,
    load_row,
    number_items,
    row_layout,
    row_of_item,
    scatter_rows,
    total_items,
    write_rows,
)
from pallas_kernels.tile_copy_mgpu import (
    TileCopy,
    copy_shifted_rows,
    copy_token_rows,
    copy_whole_block,
    free_stage,
)
from pallas_kernels.tiling import (
    LANES,
    LINE_BYTES,
    PoolGroup,
    ShiftedRows,
    TokenRows,
    WholeBlocks,
    group_pools,
    round_up,
)

# Rows planned at once, at most: a longer batch is planned and copied in chunks.
_MAX_ROWS = 512
# Shared memory for the request vectors of a chunk, at most, unless the smallest chunk needs more.
_MAX_VECTOR_BYTES = 32 * 1024
# A row of fewer work items than this for each worker is dealt in runs. Longer ones lose by it: 88 instead of 94 % of
# the limit (qwen3.5-9b in SD, 32 of 128 requests copying, H200, JAX 0.11.2, 2026-11-30).
_SHORT_ROW_ITEMS = 4
# Shared memory of a thread block, less what barriers and reductions take.
_SHARED_BYTES = 225 * 1024

Ref = Any


def move_states(
    leaves: Sequence[jax.Array],
    pools: Sequence[Pool],
    operation: Operation,
    request: Request,
    views: Sequence[View],
    *,
    num_rows: int,
    conv_layout: ConvStateLayout,
    null_block_id: int | None,
    config: KernelConfig,
    interpret: Any,
) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
    """Plans and carries out one step in a single launch, in place on donated leaves.

    Args:
      leaves: one array per pool, at least one.
      pools: their static descriptions; `tiling.kernel_obstacle` is None for each.
      operation: what to do. Static.
      request: the index arrays, none of them empty.
      views: the row vectors in `request.row_arrays`. Static.
      num_rows: rows of the batch. Static.
      conv_layout: layout of the conv pools. Static.
      null_block_id: id that is never copied from or to; None for no such id. Static.
      config: tuning knobs, resolved. Static.
      interpret: None, or `InterpretGPUParams`. Static.

    Returns:
      The leaves after the copies (aliases of the donated ones) and the slot vectors that the
      operation updates, int32 `[S]` each.

    Raises:
      NotImplementedError: a row has more tiles than int32 can number for 128 rows.
    """
    arrays, all_views = collect_vectors(request, views)
    mapped = request.idx_mapping is not None
    num_reqs = jnp.int32(num_rows) if request.num_reqs is None else request.num_reqs
    old = tuple(request.slot_vectors[index] for index in operation.updated)
    step = _Step(
        operation=operation,
        groups=group_pools(pools, conv_layout, tile_bytes=config.tile_bytes, stage_bytes=config.stage_bytes),
        views=all_views,
        mapped=mapped,
        num_rows=num_rows if mapped or not old else max(num_rows, old[0].shape[0]),
        batch=num_rows,
        null_block_id=null_block_id,
        num_ctas=config.num_ctas,
        most_warpgroups=config.num_warpgroups,
    )
    refs = [jax.new_ref(leaf.reshape(-1, pool.block_size)) for leaf, pool in zip(leaves, pools, strict=True)]
    updated = plgpu.kernel(
        functools.partial(_copy_states, step),
        out_type=[jax.ShapeDtypeStruct(vector.shape, jnp.int32) for vector in old],
        grid=(step.num_ctas,),
        grid_names=("cta",),
        num_threads=step.num_warpgroups,
        thread_name="warpgroup",
        scratch_types=step.scratch_types,
        interpret=interpret,
        kernel_name="mamba_state_copy",
    )(
        arrays,
        () if request.block_tables is None else (request.block_tables,),
        num_reqs.reshape(1),
        old if mapped else (),
        refs,
    )
    return [jax.freeze(ref).reshape(leaf.shape) for ref, leaf in zip(refs, leaves, strict=True)], tuple(updated)


@dataclasses.dataclass(frozen=True)
class _Step:
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


def _copy_states(
    step: _Step,
    arrays_gmem: Sequence[Ref],
    tables_gmem: Sequence[Ref],
    num_reqs_gmem: Ref,
    old_gmem: Sequence[Ref],
    pools_gmem: Sequence[Ref],
    *updated_gmem: Ref,
    rows_smem: Ref,
    updates_smem: Sequence[Ref],
    items_smem: Ref,
    stages_smem: Sequence[Ref],
    fetched: Ref | None,
    planned: Ref,
    copied: Ref | None,
    loaded: Ref,
) -> None:
    """The kernel: chunk by chunk, decides all rows, updates the slot vectors and copies the states."""
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")

    if step.mapped:

        @pl.when((cta == 0) & (warpgroup == 0))
        def _keep_slots() -> None:
            for src_gmem, dst_gmem, buffer_smem in zip(old_gmem, updated_gmem, updates_smem, strict=True):
                copy_vector(src_gmem, dst_gmem, buffer_smem, loaded.at[0], step.num_loads)

    def do_chunk(chunk: jax.Array | int) -> None:
        first_row = chunk * step.chunk_rows

        @pl.when(warpgroup == 0)
        def _plan() -> None:
            # Read first and used last, so that it travels with the vectors.
            num_reqs = num_reqs_gmem[0]
            values = bring_rows(step.views, arrays_gmem, rows_smem, fetched, chunk, step.chunk_rows)
            num_live = jnp.minimum(num_reqs, step.batch)
            row = plgpu.broadcasted_iota(jnp.int32, (step.chunk_rows,), 0, layout=row_layout(step.chunk_rows))
            live = first_row + row < num_live
            if step.mapped:
                *values, slot = values
                live &= (slot >= 0) & (slot < updated_gmem[0].shape[0])
            decision = step.operation.decide(values, live)
            number_items(items_smem, jnp.where(decision.copies, step.num_items(decision.offset), 0))
            plgpu.barrier_arrive(planned)

            @pl.when(cta == 0)
            def _update_slots() -> None:
                for update, update_smem in zip(decision.updates, updates_smem, strict=True):
                    update_smem[...] = update
                plgpu.commit_smem()
                for update_smem, vector_gmem in zip(updates_smem, updated_gmem, strict=True):
                    if step.mapped:
                        count = jnp.clip(num_live - first_row, 0, step.chunk_rows)
                        scatter_rows(update_smem, vector_gmem, lambda row: rows_smem[step.num_values, row], count)
                    else:
                        write_rows(update_smem, vector_gmem, chunk, step.chunk_rows)

        def plan_row(row: jax.Array) -> tuple[jax.Array, dict[int, BlockIds]]:
            values = load_row(step.views[: step.num_values], rows_smem, row)
            ids = {table: _block_ids(step, values, table, tables_gmem, first_row + row) for table in step.tables}
            return step.operation.decide(values, jnp.bool_(True)).offset, ids

        plgpu.barrier_wait(planned)
        stages = [stage_smem.at[warpgroup] for stage_smem in stages_smem]
        # Neighbours among the workers are on different SMs.
        worker = warpgroup * step.num_ctas + cta
        _deal_items(step, worker, items_smem, plan_row, pools_gmem, stages, loaded.at[warpgroup])
        # The stores have read shared memory. The end of the launch waits for what they write.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def do_chunk_of_many(chunk: jax.Array) -> None:
        do_chunk(chunk)
        plgpu.barrier_arrive(copied)

        # The next chunk's vectors arrive where this one's were just read.
        @pl.when(warpgroup == 0)
        def _wait_for_all() -> None:
            plgpu.barrier_wait(copied)
            plgpu.commit_smem()

    if step.num_chunks == 1:
        do_chunk(0)
    else:
        pl.loop(jnp.int32(0), jnp.int32(step.num_chunks))(do_chunk_of_many)


def _block_ids(
    step: _Step, values: Sequence[jax.Array], table: int, tables_gmem: Sequence[Ref], row: jax.Array
) -> BlockIds:
    """The blocks of one row, from the block table where there is one."""
    if not tables_gmem:
        return step.operation.block_ids(values, table)
    (table_gmem,) = tables_gmem
    look_up = guarded(lambda column: table_gmem[table, row, column], table_gmem.shape[2])
    return step.operation.block_ids(values, table, look_up)


def _deal_items(
    step: _Step,
    worker: jax.Array,
    items_smem: Ref,
    plan_row: Callable[[jax.Array], tuple[jax.Array, dict[int, BlockIds]]],
    pools_gmem: Sequence[Ref],
    stages_smem: Sequence[Ref],
    loaded: Ref,
) -> None:
    """Copies the share of the work items of one warpgroup, the `worker`-th of the grid, row after row."""
    num_workers, total = jnp.int32(step.num_workers), total_items(items_smem)
    if step.deals_runs:
        share, rest = lax.div(total, num_workers), lax.rem(total, num_workers)
        first, stride = worker * share + jnp.minimum(worker, rest), jnp.int32(1)
        end = first + share + (worker < rest).astype(jnp.int32)
    else:
        first, stride, end = worker, num_workers, total

    def copy_row(start: jax.Array) -> jax.Array:
        row, row_start, row_end = row_of_item(items_smem, start)
        offset, ids = plan_row(row)
        row_end = jnp.minimum(row_end, end)

        @pl.loop(start - row_start, row_end - row_start, step=stride)
        def _item(item: jax.Array) -> None:
            group_start: int | jax.Array = 0
            for group in step.groups:
                copy_tile = functools.partial(
                    _copy_tile,
                    step,
                    group,
                    [pools_gmem[i] for i in group.members],
                    item - group_start,
                    offset,
                    ids[group.pool.table],
                    stages_smem[step.dtypes.index(group.pool.dtype)],
                    loaded,
                )
                group_end = group_start + group.num_items(offset)
                pl.when((item >= group_start) & (item < group_end))(copy_tile)
                group_start = group_end
            free_stage()

        return start + lax.div(row_end - start + stride - 1, stride) * stride

    lax.while_loop(lambda item: item < end, copy_row, first)


def _copy_tile(
    step: _Step,
    group: PoolGroup,
    refs: Sequence[Ref],
    item: jax.Array,
    offset: jax.Array,
    ids: BlockIds,
    stage_smem: Ref,
    loaded: Ref,
) -> None:
    """Copies the group's `item`-th tile, unless the row's block ids rule the copy out."""
    pool, tiling = group.pool, group.tiling
    is_conv = pool.kind is StateKind.CONV
    # Numbered by tile first, then by block, and last by moved token, whose number alone depends on the offset: so
    # every divisor is static.
    tiles, blocks = jnp.int32(tiling.row_items), jnp.int32(group.blocks_per_row)
    tile, block = lax.rem(item, tiles), lax.rem(lax.div(item, tiles), blocks)
    index = lax.div(item, tiles * blocks)
    layer = lax.rem(block, jnp.int32(group.num_layers))
    src, shift = (ids.conv_src, offset) if is_conv else (ids.temporal_src, jnp.int32(0))
    usable = blocks_usable(src, ids.dst, num_blocks=pool.num_blocks, null_block_id=step.null_block_id)

    @pl.when(usable & window_moves(src, ids.dst, shift, group.state_len))
    def _move() -> None:
        copy = TileCopy(
            pools_gmem=refs,
            pool=lax.div(block, jnp.int32(group.num_layers)),
            stage_smem=stage_smem,
            loaded=loaded,
            num_arrivals=step.num_loads,
            src=layer * pool.num_blocks + src,
            dst=layer * pool.num_blocks + ids.dst,
            offset=shift,
        )
        match tiling:
            case TokenRows():
                copy_token_rows(tiling, copy, block, index, tile)
            case ShiftedRows():
                copy_shifted_rows(tiling, copy, tile)
            case WholeBlocks():
                copy_whole_block(tiling, copy)
