"""How the Mosaic GPU kernel cuts blocks into tiles. Static geometry, no device code.

A bulk copy moves whole units of 16 bytes between 16-byte aligned addresses, so every tile starts
and ends on such a unit. A stage is the shared memory that one tile passes through.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from layouts import ConvStateLayout
from pallas_kernels.config import MAX_STAGE_BYTES
from pallas_kernels.pools import Pool, StateKind

# What a bulk copy moves a multiple of.
COPY_UNIT_BYTES = 16
# Source and destination of a bulk copy should lie alike in a line of this size: with request vectors
# that did not, a launch that copies nothing took 3.3 us instead of 1.7 (H200, JAX 0.11.2, 2026-11-29).
LINE_BYTES = 128
# One Pallas thread is a warpgroup, whose vectors hold a multiple of 128 elements.
LANES = 128
# A shift handles a tile in vectors of at most this many elements, to bound its registers.
_MAX_VECTOR = 1024


def num_tiles(extent: int, tile: int) -> int:
    """Tiles of `extent` elements, the last one possibly smaller."""
    return -(-extent // tile)


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Blocks of `num_tokens` rows, each a whole number of copy units: temporal and aligned SD blocks.

    A tile is a range of one row, which moves without touching a register. A temporal block is a
    single row. Of the others, only the rows from the copy's token offset on have tiles.

    Attributes:
      num_tokens: rows of a block.
      extent: elements of a row, the axis that is tiled.
      tile: elements of a tile.
    """

    num_tokens: int
    extent: int
    tile: int

    @property
    def row_items(self) -> int:
        """Work items of a row: its tiles."""
        return num_tiles(self.extent, self.tile)

    @property
    def max_items(self) -> int:
        """Work items of a block, at most: those of all its rows."""
        return self.num_tokens * self.row_items

    def num_items(self, offset: jax.Array) -> int | jax.Array:
        """Work items of a block: the tiles of the rows that move, none if the offset leaves the window.

        A block of one row, as every temporal one, has its tiles at any offset.
        """
        if self.num_tokens == 1:
            return self.max_items
        inside = (offset >= 0) & (offset < self.num_tokens)
        return jnp.where(inside, self.num_tokens - offset, 0) * self.row_items

    @property
    def stage_elements(self) -> int:
        """Elements of the stage that a tile passes through."""
        return self.tile

    @property
    def num_loads(self) -> int:
        """Loads in flight at once, at most."""
        return 1


@dataclasses.dataclass(frozen=True)
class ShiftedRows:
    """Blocks whose tokens are the inner axis, `[dim, state_len]`: DS. A tile is a range of whole channels.

    Attributes:
      state_len: elements of a channel.
      extent: elements of a block, the axis that is tiled.
      tile: elements of a tile, a multiple of `state_len`.
    """

    state_len: int
    extent: int
    tile: int

    @property
    def row_items(self) -> int:
        """Work items of a row, which is the whole block here."""
        return self.max_items

    @property
    def max_items(self) -> int:
        """Work items of a block: its tiles."""
        return num_tiles(self.extent, self.tile)

    def num_items(self, offset: jax.Array) -> int:
        """Work items of a block, whatever the offset."""
        return self.max_items

    @property
    def destination_start(self) -> int:
        """Where the destination's old bytes lie in the stage, behind the source and what a shift overreads."""
        return round_up(padded(self.tile) + self.state_len, LANES)

    @property
    def stage_elements(self) -> int:
        """Elements of the stage that a tile passes through."""
        return self.destination_start + padded(self.tile)

    @property
    def num_loads(self) -> int:
        """Loads in flight at once, at most: the source's and the destination's."""
        return 2


@dataclasses.dataclass(frozen=True)
class WholeBlocks:
    """SD blocks whose rows are no whole number of copy units.

    No tile of theirs is independent of its neighbours, so one warpgroup walks the whole block
    from front to back. Real models have no such shapes; they are slow, but right.

    Attributes:
      row: elements of a token's row.
      extent: elements of a block.
      tile: elements of a step.
      unit: elements of a copy unit.
    """

    row: int
    extent: int
    tile: int
    unit: int

    @property
    def row_items(self) -> int:
        """Work items of a row, which is the whole block here."""
        return self.max_items

    @property
    def max_items(self) -> int:
        """Work items of a block: the block itself."""
        return 1

    def num_items(self, offset: jax.Array) -> int:
        """Work items of a block, whatever the offset."""
        return self.max_items

    @property
    def source_tile(self) -> int:
        """Elements read for a step: a copy unit more, since a shifted source starts anywhere in a unit."""
        return min(self.extent, self.tile + self.unit)

    @property
    def destination_start(self) -> int:
        """Where the destination's old bytes lie in the stage, behind the source and what a shift overreads."""
        return round_up(self.source_tile + padded(self.tile), LANES)

    @property
    def stage_elements(self) -> int:
        """Elements of the stage that a tile passes through."""
        return self.destination_start + padded(self.tile)

    @property
    def num_loads(self) -> int:
        """Loads in flight at once, at most: the source's and the destination's."""
        return 2


Tiling = TokenRows | ShiftedRows | WholeBlocks


def vector_size(tile: int) -> int:
    """Elements of the vectors that shift a tile: as few vectors as possible, all alike."""
    return round_up(num_tiles(tile, num_tiles(tile, _MAX_VECTOR)), LANES)


def padded(tile: int) -> int:
    """`tile` rounded up to whole vectors."""
    return round_up(tile, vector_size(tile))


def _even_tile(extent: int, limit: int, row: int, itemsize: int) -> int:
    """A tile of whole rows, at most about `limit` elements, that cuts `extent` as evenly as its alignment allows.

    Tiles start on a line where a multiple of rows that does so is no larger than `limit`, else on a
    copy unit. A last tile of another size costs code of its own, so tiles are up to twice as small if
    that makes them all alike.
    """
    multiple = math.lcm(row, LINE_BYTES // math.gcd(LINE_BYTES, itemsize))
    if multiple > limit:
        multiple = math.lcm(row, COPY_UNIT_BYTES // math.gcd(COPY_UNIT_BYTES, itemsize))
    fewest = num_tiles(extent, max(limit // multiple, 1) * multiple)
    for count in range(fewest, 2 * fewest + 1):
        if extent % (count * multiple) == 0:
            return extent // count
    return min(round_up(num_tiles(extent, fewest), multiple), extent)


def tile_blocks(pool: Pool, conv_layout: ConvStateLayout, *, tile_bytes: int, stage_bytes: int) -> Tiling:
    """Cuts the blocks of `pool` into tiles.

    Temporal tiles take about `tile_bytes`, SD tiles up to a quarter more but no more than `stage_bytes`. The
    stage of a DS tile takes about `stage_bytes`.
    """
    itemsize = pool.dtype.itemsize
    unit = COPY_UNIT_BYTES // math.gcd(COPY_UNIT_BYTES, itemsize)
    size = pool.block_size
    if pool.kind is StateKind.TEMPORAL:
        num_tokens, row, limit = 1, size, tile_bytes
    elif conv_layout is ConvStateLayout.DS:
        state_len = pool.block_shape[1]
        return ShiftedRows(state_len, size, tile=_even_tile(size, stage_bytes // 2 // itemsize, state_len, itemsize))
    else:
        # Rows are short: rather a tile that is a quarter larger than one more.
        (num_tokens, row), limit = pool.block_shape, min(tile_bytes * 5 // 4, stage_bytes)
    if row % unit == 0:
        return TokenRows(num_tokens, row, tile=_even_tile(row, limit // itemsize, 1, itemsize))
    return WholeBlocks(row, size, tile=_even_tile(size, stage_bytes // 3 // itemsize, 1, itemsize), unit=unit)


@dataclasses.dataclass(frozen=True)
class PoolGroup:
    """Pools that share the code of a tile: same kind, geometry, type and block table.

    Attributes:
      members: their places among all pools.
      pool: what they have in common.
      tiling: how their blocks are cut.
      state_len: tokens of a window; 1 for temporal pools.
    """

    members: tuple[int, ...]
    pool: Pool
    tiling: Tiling
    state_len: int

    @property
    def num_layers(self) -> int:
        """Layers in each member."""
        return self.pool.num_layers or 1

    @property
    def blocks_per_row(self) -> int:
        """Blocks that one copying row moves: one in each layer of each member."""
        return len(self.members) * self.num_layers

    @property
    def max_items(self) -> int:
        """Work items of a copying row, at most."""
        return self.blocks_per_row * self.tiling.max_items

    def num_items(self, offset: jax.Array) -> int | jax.Array:
        """Work items of a copying row whose windows shift by `offset` tokens."""
        return self.blocks_per_row * self.tiling.num_items(offset)


def group_pools(
    pools: Sequence[Pool], conv_layout: ConvStateLayout, *, tile_bytes: int, stage_bytes: int
) -> tuple[PoolGroup, ...]:
    """Groups pools by everything but their bytes."""
    members: dict[Pool, list[int]] = {}
    for i, pool in enumerate(pools):
        members.setdefault(pool, []).append(i)
    return tuple(
        PoolGroup(
            members=tuple(indices),
            pool=pool,
            tiling=tile_blocks(pool, conv_layout, tile_bytes=tile_bytes, stage_bytes=stage_bytes),
            state_len=pool.block_shape[conv_layout.token_axis - 1] if pool.kind is StateKind.CONV else 1,
        )
        for pool, indices in members.items()
    )


def kernel_obstacle(pool: Pool, conv_layout: ConvStateLayout) -> str | None:
    """Says what keeps `pool` off the Mosaic GPU kernel; None if nothing does."""
    if not _is_kernel_dtype(pool.dtype):
        return f"{pool.path} has dtype {pool.dtype.name}; the kernel moves 1-, 2-, 4- and 8-byte integers and floats"
    if pool.block_bytes % COPY_UNIT_BYTES:
        return f"{pool.path} has blocks of {pool.block_bytes} bytes; the kernel takes multiples of {COPY_UNIT_BYTES}"
    tiling = tile_blocks(pool, conv_layout, tile_bytes=0, stage_bytes=0) if pool.size else None
    if tiling and tiling.stage_elements * pool.dtype.itemsize > MAX_STAGE_BYTES:
        return f"{pool.path} has a state_len of {pool.block_shape[1]}, too long for a stage in shared memory"
    return None


def _is_kernel_dtype(dtype: np.dtype) -> bool:
    if jax.numpy.issubdtype(dtype, np.integer):
        return jax.numpy.iinfo(dtype).bits in (8, 16, 32, 64)
    if jax.numpy.issubdtype(dtype, np.floating):
        return jax.numpy.finfo(dtype).bits in (8, 16, 32, 64)
    return False
