"""Moves one tile of a block on Mosaic GPU: bulk copies through a stage, registers only to shift.

Each function leaves its last stores to the caller, who commits them and waits (`free_stage`) before the
stage is used again.
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

from pallas_kernels.tiling import ShiftedRows, TokenRows, WholeBlocks, num_tiles, padded, vector_size

_INT_OF_BYTES = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32, 8: jnp.int64}

# The default out-of-bounds mode needs a descriptor of at most 256 elements a side. This one is the
# plain bulk copy, and every start and size below is inside its block.
bulk_load = functools.partial(plgpu.copy_gmem_to_smem, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
bulk_store = functools.partial(plgpu.copy_smem_to_gmem, commit_group=False)

Ref = Any
Index = Any


@dataclasses.dataclass(frozen=True)
class TileCopy:
    """The operands of one tile's copy.

    Attributes:
      pools_gmem: refs `[rows, elements of a block]` of equal geometry.
      pool: which of them, int32.
      stage_smem: ref `[stage elements]`.
      loaded: barrier that counts `num_arrivals` loads.
      num_arrivals: the most loads that any tile of the kernel has in flight. Static.
      src: row of the source block, int32.
      dst: row of the destination block, int32.
      offset: tokens to shift by, int32 in `[0, state_len)`.
    """

    pools_gmem: Sequence[Ref]
    pool: jax.Array
    stage_smem: Ref
    loaded: Ref
    num_arrivals: int
    src: jax.Array
    dst: jax.Array
    offset: jax.Array

    def load(self, block: jax.Array, start: Index, size: int, stage_start: Index) -> None:
        """Starts a copy of `size` elements of `block` into the stage."""
        stage = self.stage_smem.at[pl.ds(stage_start, size)]
        self._on_pool(lambda ref: bulk_load(ref.at[block, pl.ds(start, size)], stage, self.loaded))

    def wait(self, num_loads: int | jax.Array) -> None:
        """Waits until the `num_loads` loads that were started have arrived."""
        wait_for_loads(self.loaded, num_loads, self.num_arrivals)

    def store(self, start: Index, size: int, stage_start: Index) -> None:
        """Starts a copy of `size` elements of the stage into the destination block."""
        stage = self.stage_smem.at[pl.ds(stage_start, size)]
        self._on_pool(lambda ref: bulk_store(stage, ref.at[self.dst, pl.ds(start, size)]))

    def _on_pool(self, copy: Callable[[Ref], None]) -> None:
        if len(self.pools_gmem) == 1:
            copy(self.pools_gmem[0])
        else:
            lax.switch(self.pool, [functools.partial(copy, ref) for ref in self.pools_gmem])


def wait_for_loads(loaded: Ref, num_loads: int | jax.Array, num_arrivals: int) -> None:
    """Waits for `num_loads` loads on a barrier that counts `num_arrivals`: those that are missing arrive too.

    One barrier serves all tiles of a warpgroup, because each barrier costs time at launch.
    """
    if isinstance(num_loads, int):
        for _ in range(num_loads, num_arrivals):
            plgpu.barrier_arrive(loaded)
    else:
        pl.loop(num_loads, jnp.int32(num_arrivals))(lambda _: plgpu.barrier_arrive(loaded))
    plgpu.barrier_wait(loaded)


def copy_token_rows(tiling: TokenRows, copy: TileCopy, block: jax.Array, index: jax.Array, tile: jax.Array) -> None:
    """Moves a range of the `index`-th moved token's row, or within one block the same range of all of them in order."""
    in_place = copy.src == copy.dst

    def move(start: Index, size: int) -> None:
        def move_token(token: Index) -> None:
            copy.load(copy.src, token * tiling.extent + start, size, 0)
            copy.wait(1)
            if tiling.num_tokens > 1:
                # A block that is shifted in place is written where it was just read. The wait orders that on
                # the device; the interpreter's race detection wants the fence too.
                pl.when(in_place)(plgpu.commit_smem)
            copy.store((token - copy.offset) * tiling.extent + start, size, 0)

        if tiling.num_tokens == 1:
            move_token(0)
            return
        num_moved = tiling.num_tokens - copy.offset

        def all_or_none() -> tuple[jax.Array, jax.Array]:
            # One token's item moves them all and the others are left nothing. Which one differs from block to
            # block, so that neighbouring items do not all have that much to do.
            moves_all = index == lax.rem(block, num_moved)
            return jnp.int32(0), jnp.where(moves_all, num_moved, 0)

        first, end = lax.cond(in_place, all_or_none, lambda: (index, index + 1))

        @pl.loop(first, end)
        def _token(moved: jax.Array) -> None:
            pl.when(moved > first)(free_stage)
            move_token(copy.offset + moved)

    _with_tile(tiling, tile, move)


def copy_shifted_rows(tiling: ShiftedRows, copy: TileCopy, tile: jax.Array) -> None:
    """Shifts the tokens of a channel range within each channel; its last `offset` tokens keep their bytes."""
    shifted, in_place = copy.offset > 0, copy.src == copy.dst

    def move(start: Index, size: int) -> None:
        # The source, and behind it what the destination keeps.
        loads_kept = (shifted & ~in_place).astype(jnp.int32)

        @pl.loop(jnp.int32(0), 1 + loads_kept)
        def _load(which: jax.Array) -> None:
            block = jnp.where(which == 0, copy.src, copy.dst)
            copy.load(block, start, size, which * tiling.destination_start)

        copy.wait(1 + loads_kept)

        @pl.when(shifted)
        def _shift_tile() -> None:
            _shift(
                copy.stage_smem,
                size,
                source_start=copy.offset,
                kept_start=loads_kept * tiling.destination_start,
                destination_start=tiling.destination_start,
                is_moved=lambda i: lax.rem(i, jnp.int32(tiling.state_len)) < tiling.state_len - copy.offset,
            )

        copy.store(start, size, shifted.astype(jnp.int32) * tiling.destination_start)

    _with_tile(tiling, tile, move)


def copy_whole_block(tiling: WholeBlocks, copy: TileCopy) -> None:
    """Moves a whole block front to back, realigning the shifted source in registers."""
    shift = copy.offset * tiling.row
    num_moved = tiling.extent - shift

    def move(start: Index, size: int) -> None:
        @pl.when(start < num_moved)
        def _step() -> None:
            aligned = lax.div(start + shift, jnp.int32(tiling.unit)) * tiling.unit
            source = jnp.minimum(aligned, tiling.extent - tiling.source_tile)
            copy.load(copy.src, source, tiling.source_tile, 0)
            copy.load(copy.dst, start, size, tiling.destination_start)
            copy.wait(2)
            _shift(
                copy.stage_smem,
                size,
                source_start=start + shift - source,
                kept_start=tiling.destination_start,
                destination_start=tiling.destination_start,
                is_moved=lambda i: i < num_moved - start,
            )
            copy.store(start, size, tiling.destination_start)
            plgpu.commit_smem_to_gmem_group()
            # Within one block the last step's source may begin in what the steps before it wrote.
            plgpu.wait_smem_to_gmem(0)

    @pl.loop(jnp.int32(0), jnp.int32(num_tiles(tiling.extent, tiling.tile)))
    def _walk(tile: jax.Array) -> None:
        _with_tile(tiling, tile, move)


def free_stage() -> None:
    """Waits until the stores that were issued have read the stage."""
    plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _with_tile(
    tiling: TokenRows | ShiftedRows | WholeBlocks, tile: jax.Array, move: Callable[[Index, int], None]
) -> None:
    """Calls `move(start, size)` with a static size, which the last tile may have to itself."""
    last = num_tiles(tiling.extent, tiling.tile) - 1
    last_size = tiling.extent - last * tiling.tile
    if last_size == tiling.tile:
        move(tile * tiling.tile, tiling.tile)
    else:
        if last > 0:
            pl.when(tile < last)(lambda: move(tile * tiling.tile, tiling.tile))
        pl.when(tile == last)(lambda: move(last * tiling.tile, last_size))


def _shift(
    stage_smem: Ref,
    size: int,
    *,
    source_start: jax.Array,
    kept_start: int | jax.Array,
    destination_start: int,
    is_moved: Callable[[jax.Array], jax.Array],
) -> None:
    """Puts the moved elements of the staged source and the kept elements at the start of the destination."""
    length = vector_size(size)
    layout = plgpu.Layout.WG_STRIDED((length,), vec_size=1)
    dtype = stage_smem.dtype
    bits = _INT_OF_BYTES[np.dtype(dtype).itemsize]

    def load(start: Index) -> jax.Array:
        vector = plgpu.load(stage_smem.at[pl.ds(start, length)], layout=layout, optimized=False)
        return lax.bitcast_convert_type(vector, bits)

    @pl.loop(jnp.int32(0), jnp.int32(padded(size) // length))
    def _vector(k: jax.Array) -> None:
        start = k * length
        source, kept = load(source_start + start), load(kept_start + start)
        index = start + plgpu.broadcasted_iota(jnp.int32, (length,), 0, layout=layout)
        # Masks, because Mosaic GPU has no select on 8-bit types.
        mask = (-is_moved(index).astype(jnp.int32)).astype(bits)
        merged = (source & mask) | (kept & ~mask)
        stage_smem[pl.ds(destination_start + start, length)] = lax.bitcast_convert_type(merged, dtype)

    plgpu.commit_smem()
