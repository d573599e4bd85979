"""The Mosaic GPU kernel: one persistent launch plans the step and copies every layer.

In each thread block, one warpgroup decides the whole batch from the request vectors and numbers the
work items with a prefix sum in shared memory: one tile of one pool of one copying row each. They are
dealt to all warpgroups of the grid. Tiles travel by bulk asynchronous copies between global and shared
memory, which take any number of 16-byte units; only the strided shift of a conv window passes through
registers. Pools of equal geometry share the code of a tile and differ in a `lax.switch` over refs.

Dims: S = slots, R = rows of the batch, G = block tables, C = columns.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from layouts import ConvStateLayout
from pallas_kernels.config import KernelConfig
from pallas_kernels.launch_mgpu import Launch
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
    PoolGroup,
    ShiftedRows,
    TokenRows,
    WholeBlocks,
    group_pools,
)

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
    launch = Launch(
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
        functools.partial(_copy_states, launch),
        out_type=[jax.ShapeDtypeStruct(vector.shape, jnp.int32) for vector in old],
        grid=(launch.num_ctas,),
        grid_names=("cta",),
        num_threads=launch.num_warpgroups,
        thread_name="warpgroup",
        scratch_types=launch.scratch_types,
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


def _copy_states(
    launch: Launch,
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

    if launch.mapped:

        @pl.when((cta == 0) & (warpgroup == 0))
        def _keep_slots() -> None:
            for src_gmem, dst_gmem, buffer_smem in zip(old_gmem, updated_gmem, updates_smem, strict=True):
                copy_vector(src_gmem, dst_gmem, buffer_smem, loaded.at[0], launch.num_loads)

    def do_chunk(chunk: jax.Array | int) -> None:
        first_row = chunk * launch.chunk_rows

        @pl.when(warpgroup == 0)
        def _plan() -> None:
            # Read first and used last, so that it travels with the vectors.
            num_reqs = num_reqs_gmem[0]
            values = bring_rows(launch.views, arrays_gmem, rows_smem, fetched, chunk, launch.chunk_rows)
            num_live = jnp.minimum(num_reqs, launch.batch)
            row = plgpu.broadcasted_iota(jnp.int32, (launch.chunk_rows,), 0, layout=row_layout(launch.chunk_rows))
            live = first_row + row < num_live
            if launch.mapped:
                *values, slot = values
                live &= (slot >= 0) & (slot < updated_gmem[0].shape[0])
            decision = launch.operation.decide(values, live)
            number_items(items_smem, jnp.where(decision.copies, launch.num_items(decision.offset), 0))
            plgpu.barrier_arrive(planned)

            @pl.when(cta == 0)
            def _update_slots() -> None:
                for update, update_smem in zip(decision.updates, updates_smem, strict=True):
                    update_smem[...] = update
                plgpu.commit_smem()
                for update_smem, vector_gmem in zip(updates_smem, updated_gmem, strict=True):
                    if launch.mapped:
                        count = jnp.clip(num_live - first_row, 0, launch.chunk_rows)
                        scatter_rows(update_smem, vector_gmem, lambda row: rows_smem[launch.num_values, row], count)
                    else:
                        write_rows(update_smem, vector_gmem, chunk, launch.chunk_rows)

        def plan_row(row: jax.Array) -> tuple[jax.Array, dict[int, BlockIds]]:
            values = load_row(launch.views[: launch.num_values], rows_smem, row)
            ids = {table: _block_ids(launch, values, table, tables_gmem, first_row + row) for table in launch.tables}
            return launch.operation.decide(values, jnp.bool_(True)).offset, ids

        plgpu.barrier_wait(planned)
        stages = [stage_smem.at[warpgroup] for stage_smem in stages_smem]
        # Neighbours among the workers are on different SMs.
        worker = warpgroup * launch.num_ctas + cta
        _deal_items(launch, worker, items_smem, plan_row, pools_gmem, stages, loaded.at[warpgroup])
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

    if launch.num_chunks == 1:
        do_chunk(0)
    else:
        pl.loop(jnp.int32(0), jnp.int32(launch.num_chunks))(do_chunk_of_many)


def _block_ids(
    launch: Launch, values: Sequence[jax.Array], table: int, tables_gmem: Sequence[Ref], row: jax.Array
) -> BlockIds:
    """The blocks of one row, from the block table where there is one."""
    if not tables_gmem:
        return launch.operation.block_ids(values, table)
    (table_gmem,) = tables_gmem
    look_up = guarded(lambda column: table_gmem[table, row, column], table_gmem.shape[2])
    return launch.operation.block_ids(values, table, look_up)


def _deal_items(
    launch: Launch,
    worker: jax.Array,
    items_smem: Ref,
    plan_row: Callable[[jax.Array], tuple[jax.Array, dict[int, BlockIds]]],
    pools_gmem: Sequence[Ref],
    stages_smem: Sequence[Ref],
    loaded: Ref,
) -> None:
    """Copies the share of the work items of one warpgroup, the `worker`-th of the grid, row after row."""
    num_workers, total = jnp.int32(launch.num_workers), total_items(items_smem)
    if launch.deals_runs:
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
            for group in launch.groups:
                copy_tile = functools.partial(
                    _copy_tile,
                    launch,
                    group,
                    [pools_gmem[i] for i in group.members],
                    item - group_start,
                    offset,
                    ids[group.pool.table],
                    stages_smem[launch.dtypes.index(group.pool.dtype)],
                    loaded,
                )
                group_end = group_start + group.num_items(offset)
                pl.when((item >= group_start) & (item < group_end))(copy_tile)
                group_start = group_end
            free_stage()

        return start + lax.div(row_end - start + stride - 1, stride) * stride

    lax.while_loop(lambda item: item < end, copy_row, first)


def _copy_tile(
    launch: Launch,
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
    usable = blocks_usable(src, ids.dst, num_blocks=pool.num_blocks, null_block_id=launch.null_block_id)

    @pl.when(usable & window_moves(src, ids.dst, shift, group.state_len))
    def _move() -> None:
        copy = TileCopy(
            pools_gmem=refs,
            pool=lax.div(block, jnp.int32(group.num_layers)),
            stage_smem=stage_smem,
            loaded=loaded,
            num_arrivals=launch.num_loads,
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
