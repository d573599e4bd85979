"""The Mosaic GPU kernel: one persistent launch plans the step and copies every layer.

Each thread block decides the whole batch for itself from the request vectors, numbers the copying
rows with a prefix sum in shared memory, and takes every `num_ctas`-th work item: one tile of one
pool of one copying row. Tiles travel by bulk asynchronous copies between global and shared memory,
which take any number of 16-byte units; only the strided shift of a conv window passes through
registers. Pools of equal geometry share the code of a tile and differ in a `lax.switch` over refs.

Dims: R = request rows, G = block tables, B = batch, C = columns, N = num_blocks, E = elements per
block, V = request vectors.
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
from pallas_kernels.plan import BlockIds, Decision, blocks_usable, conv_copies, look_up_blocks
from pallas_kernels.pools import Pool, StateKind
from pallas_kernels.tile_copy_mgpu import (
    TileCopy,
    bulk_load,
    bulk_store,
    copy_shifted_rows,
    copy_token_rows,
    copy_unaligned_token_rows,
)
from pallas_kernels.tiling import LANES, ShiftedRows, Tiling, TokenRows, num_tiles, tile_blocks

# Rows planned at once: a longer batch is planned and copied in chunks of this size.
_MAX_ROWS = 512
# int32 elements of one 16-byte copy unit.
_UNIT = 4

Ref = Any
Decide = Callable[[Sequence[jax.Array], jax.Array], Decision]


def move_states(
    leaves: Sequence[jax.Array],
    pools: Sequence[Pool],
    vectors: Sequence[jax.Array],
    block_tables: jax.Array,
    num_reqs: jax.Array,
    *,
    decide: Decide,
    conv_layout: ConvStateLayout,
    null_block_id: int | None,
    config: KernelConfig,
    num_ctas: int,
    interpret: Any,
) -> tuple[list[jax.Array], jax.Array]:
    """Plans and carries out one step in a single launch, in place on donated leaves.

    Args:
      leaves: one array per pool.
      pools: their static descriptions; `selection.kernel_obstacle` is None for each.
      vectors: int32 `[R]` each, R >= 1.
      block_tables: int32 `[G, B, C]`, none of them 0.
      num_reqs: int32 `[1]`: rows from there on, and from B on, are padding.
      decide: turns the vectors and a live mask into a `Decision`; called with vectors and with scalars.
      conv_layout: layout of the conv pools. Static.
      null_block_id: id that is never copied from or to; None for no such id. Static.
      config: tuning knobs. Static.
      num_ctas: size of the persistent grid. Static.
      interpret: False, or `InterpretGPUParams`. Static.

    Returns:
      The leaves after the copies (aliases of the donated ones) and the new counter, int32 `[R]`.
    """
    step = _Step(
        groups=_group_pools(pools, conv_layout, config.stage_bytes),
        num_rows=vectors[0].shape[0],
        num_vectors=len(vectors),
        batch=block_tables.shape[1],
        num_columns=block_tables.shape[2],
        decide=decide,
        null_block_id=null_block_id,
        num_ctas=num_ctas,
    )
    refs = [jax.new_ref(leaf.reshape(-1, pool.block_size)) for leaf, pool in zip(leaves, pools, strict=True)]
    counter = plgpu.kernel(
        functools.partial(_copy_states, step),
        out_type=jax.ShapeDtypeStruct((step.num_rows,), jnp.int32),
        grid=(num_ctas,),
        grid_names=("cta",),
        scratch_types=step.scratch_types,
        interpret=interpret or None,
        kernel_name="mamba_state_copy",
    )(tuple(vectors), block_tables, num_reqs, refs)
    return [jax.freeze(ref).reshape(leaf.shape) for ref, leaf in zip(refs, leaves, strict=True)], counter


@dataclasses.dataclass(frozen=True)
class _Group:
    """Pools that share the code of a tile: same kind, geometry, type and block table."""

    members: tuple[int, ...]
    pool: Pool
    tiling: Tiling

    state_len: int

    @property
    def num_layers(self) -> int:
        """Layers in each member."""
        return self.pool.num_layers or 1

    @property
    def tiles_per_block(self) -> int:
        """Work items of one block: an unaligned block is a single one."""
        return num_tiles(self.tiling) if isinstance(self.tiling, TokenRows | ShiftedRows) else 1

    @property
    def num_items(self) -> int:
        """Work items of one copying row."""
        return len(self.members) * self.num_layers * self.tiles_per_block


def _group_pools(pools: Sequence[Pool], conv_layout: ConvStateLayout, stage_bytes: int) -> tuple[_Group, ...]:
    members: dict[Pool, list[int]] = {}
    for i, pool in enumerate(pools):
        members.setdefault(pool, []).append(i)
    return tuple(
        _Group(
            members=tuple(indices),
            pool=pool,
            tiling=tile_blocks(pool, conv_layout, stage_bytes),
            state_len=pool.block_shape[conv_layout.token_axis - 1] if pool.kind is StateKind.CONV else 0,
        )
        for pool, indices in members.items()
    )


@dataclasses.dataclass(frozen=True)
class _Step:
    """Everything static about a launch."""

    groups: tuple[_Group, ...]
    num_rows: int
    num_vectors: int
    batch: int
    num_columns: int
    decide: Decide
    null_block_id: int | None
    num_ctas: int

    @property
    def chunk(self) -> int:
        """Rows planned at once, a power of two for the binary search."""
        return min(max(1 << (self.num_rows - 1).bit_length(), LANES), _MAX_ROWS)

    @property
    def num_chunks(self) -> int:
        return -(-self.num_rows // self.chunk)

    @property
    def tables(self) -> tuple[int, ...]:
        """Block tables that some pool uses."""
        return tuple(sorted({group.pool.table for group in self.groups}))

    @property
    def dtypes(self) -> tuple[np.dtype, ...]:
        return tuple(dict.fromkeys(group.pool.dtype for group in self.groups))

    @property
    def num_items(self) -> int:
        """Work items of one copying row."""
        return sum(group.num_items for group in self.groups)

    @property
    def scratch_types(self) -> dict[str, Any]:
        def stage(dtype: np.dtype) -> Any:
            elements = max(group.tiling.stage_elements for group in self.groups if group.pool.dtype == dtype)
            return plgpu.SMEM((elements,), dtype)

        return {
            "vectors_smem": plgpu.SMEM((self.num_vectors, self.chunk), jnp.int32),
            "counter_smem": plgpu.SMEM((self.chunk,), jnp.int32),
            "counts_smem": plgpu.SMEM((2 * self.chunk,), jnp.int32),
            # One stage per thread block; no tile has two types, so the types share the memory.
            "stages_smem": plgpu.RefUnion(*map(stage, self.dtypes)),
            "fetched": plgpu.Barrier(num_arrivals=self.num_vectors),
            "loaded": plgpu.Barrier(num_barriers=max(group.tiling.num_barriers for group in self.groups)),
        }


def _copy_states(
    step: _Step,
    vectors_gmem: Sequence[Ref],
    tables_gmem: Ref,
    num_reqs_gmem: Ref,
    pools_gmem: Sequence[Ref],
    counter_gmem: Ref,
    *,
    vectors_smem: Ref,
    counter_smem: Ref,
    counts_smem: Ref,
    stages_smem: Sequence[Ref],
    fetched: Ref,
    loaded: Ref,
) -> None:
    """The kernel: plans a chunk of rows, writes its counters from the first thread block, copies its states."""
    cta = lax.axis_index("cta")
    num_live = jnp.minimum(num_reqs_gmem[0], step.batch)

    def do_chunk(chunk: jax.Array | int) -> None:
        first_row = chunk * step.chunk
        _with_rows(step, chunk, lambda size: _fetch(vectors_gmem, vectors_smem, fetched, first_row, size))
        vectors = [
            plgpu.load(vectors_smem.at[v], layout=_layout(step.chunk), optimized=False) for v in range(step.num_vectors)
        ]
        row = first_row + plgpu.broadcasted_iota(jnp.int32, (step.chunk,), 0, layout=_layout(step.chunk))
        decision = step.decide(vectors, row < num_live)

        @pl.when(cta == 0)
        def _write_counter() -> None:
            counter_smem[...] = decision.num_accepted_tokens
            plgpu.commit_smem()
            _with_rows(step, chunk, lambda size: _write_back(counter_smem, counter_gmem, first_row, size))

        copies = jnp.where(decision.copies, 1, 0)
        num_copying = jnp.sum(copies, dtype=jnp.int32)

        @pl.when(num_copying > 0)
        def _copy() -> None:
            _count_before(counts_smem, copies)

            def plan_row(rank: jax.Array) -> tuple[jax.Array, dict[int, BlockIds]]:
                index = _row_of_rank(counts_smem, rank)
                row_vectors = [vectors_smem[v, index] for v in range(step.num_vectors)]
                of_row = step.decide(row_vectors, jnp.bool_(True))
                ids = {
                    table: look_up_blocks(
                        of_row,
                        lambda column, table=table: tables_gmem[table, first_row + index, column],
                        step.num_columns,
                    )
                    for table in step.tables
                }
                return of_row.offset, ids

            _deal_items(step, cta, num_copying, plan_row, pools_gmem, stages_smem, loaded)

        plgpu.wait_smem_to_gmem(0)

    def do_chunk_of_many(chunk: jax.Array) -> None:
        do_chunk(chunk)
        # The next chunk's vectors arrive by bulk copies where this one's were just read.
        plgpu.commit_smem()

    if step.num_chunks == 1:
        do_chunk(0)
    else:
        pl.loop(jnp.int32(0), jnp.int32(step.num_chunks))(do_chunk_of_many)


def _layout(length: int) -> Any:
    return plgpu.Layout.WG_STRIDED((length,), vec_size=1)


def _with_rows(step: _Step, chunk: jax.Array, act: Callable[[int], None]) -> None:
    """Calls `act` with the chunk's static number of rows, which the last chunk may have to itself."""
    last = step.num_chunks - 1
    last_size = step.num_rows - last * step.chunk
    if last == 0 or last_size == step.chunk:
        act(last_size)
    else:
        pl.when(chunk < last)(lambda: act(step.chunk))
        pl.when(chunk == last)(lambda: act(last_size))


def _fetch(vectors_gmem: Sequence[Ref], vectors_smem: Ref, fetched: Ref, first_row: jax.Array, size: int) -> None:
    """Brings rows of the request vectors into shared memory: whole copy units in bulk, the rest one by one."""
    whole = size // _UNIT * _UNIT
    if whole:
        for v, vector_gmem in enumerate(vectors_gmem):
            bulk_load(vector_gmem.at[pl.ds(first_row, whole)], vectors_smem.at[v, pl.ds(0, whole)], fetched)
    for v, vector_gmem in enumerate(vectors_gmem):
        for i in range(whole, size):
            vectors_smem[v, i] = vector_gmem[first_row + i]
    if whole:
        plgpu.barrier_wait(fetched)


def _write_back(vector_smem: Ref, vector_gmem: Ref, first_row: jax.Array, size: int) -> None:
    """Writes rows of a vector to global memory, the way `_fetch` reads them."""
    whole = size // _UNIT * _UNIT
    if whole:
        bulk_store(vector_smem.at[pl.ds(0, whole)], vector_gmem.at[pl.ds(first_row, whole)])
        plgpu.commit_smem_to_gmem_group()
    for i in range(whole, size):
        vector_gmem[first_row + i] = vector_smem[i]


def _count_before(counts_smem: Ref, copies: jax.Array) -> None:
    """Leaves in the upper half of `counts_smem` how many rows copy up to and including each row.

    A prefix sum in log2 steps: each adds the counts that lie `distance` rows back, where the lower
    half provides the zeros before the first row.
    """
    length = copies.shape[0]
    lower, upper = pl.ds(0, length), pl.ds(length, length)
    counts_smem[lower] = copies * 0
    counts_smem[upper] = copies
    distance = 1
    while distance < length:
        back = plgpu.load(counts_smem.at[pl.ds(length - distance, length)], layout=_layout(length), optimized=False)
        copies = copies + back
        counts_smem[upper] = copies
        distance *= 2


def _row_of_rank(counts_smem: Ref, rank: jax.Array) -> jax.Array:
    """The row that copies after exactly `rank` others, by binary search in the counts."""
    length = counts_smem.shape[0] // 2
    row = jnp.int32(0)
    stride = length // 2
    while stride:
        skip = counts_smem[length - 1 + row + stride] <= rank
        row = jnp.where(skip, row + stride, row)
        stride //= 2
    return row


def _deal_items(
    step: _Step,
    cta: jax.Array,
    num_copying: jax.Array,
    plan_row: Callable[[jax.Array], tuple[jax.Array, dict[int, BlockIds]]],
    pools_gmem: Sequence[Ref],
    stages_smem: Sequence[Ref],
    loaded: Ref,
) -> None:
    """Copies every `num_ctas`-th of the `num_copying * num_items` work items, row after row."""
    per_row, stride = jnp.int32(step.num_items), jnp.int32(step.num_ctas)

    def copy_row(first_item: jax.Array) -> jax.Array:
        rank = lax.div(first_item, per_row)
        first_in_row = lax.rem(first_item, per_row)
        offset, ids = plan_row(rank)

        @pl.loop(first_in_row, per_row, step=stride)
        def _item(item: jax.Array) -> None:
            # The last item's stores have left the stage.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            start = 0
            for group in step.groups:
                copy_tile = functools.partial(
                    _copy_tile,
                    step.null_block_id,
                    group,
                    [pools_gmem[i] for i in group.members],
                    item - start,
                    offset,
                    ids[group.pool.table],
                    stages_smem[step.dtypes.index(group.pool.dtype)],
                    loaded,
                )
                pl.when((item >= start) & (item < start + group.num_items))(copy_tile)
                start += group.num_items
            plgpu.commit_smem_to_gmem_group()

        done = lax.div(per_row - first_in_row + stride - 1, stride)
        return first_item + done * stride

    lax.while_loop(lambda item: item < num_copying * per_row, copy_row, cta)


def _copy_tile(
    null_block_id: int | None,
    group: _Group,
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
    tile = lax.rem(item, jnp.int32(group.tiles_per_block))
    block = lax.div(item, jnp.int32(group.tiles_per_block))
    layer = lax.rem(block, jnp.int32(group.num_layers))
    src = ids.conv_src if is_conv else ids.temporal_src
    usable = blocks_usable(src, ids.dst, num_blocks=pool.num_blocks, null_block_id=null_block_id)
    if is_conv:
        usable &= conv_copies(src, ids.dst, offset, group.state_len)
    else:
        usable &= src != ids.dst

    @pl.when(usable)
    def _move() -> None:
        copy = TileCopy(
            pools_gmem=refs,
            pool=lax.div(block, jnp.int32(group.num_layers)),
            stage_smem=stage_smem,
            loaded=loaded,
            src=layer * pool.num_blocks + src,
            dst=layer * pool.num_blocks + ids.dst,
            offset=offset if is_conv else jnp.int32(0),
        )
        match tiling:
            case TokenRows():
                copy_token_rows(tiling, copy, tile)
            case ShiftedRows():
                copy_shifted_rows(tiling, copy, tile)
            case _:
                copy_unaligned_token_rows(tiling, copy)
