"""Moves states with XLA: CPU, TPU, GPUs before Hopper, and shapes the kernel does not take."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from layouts import ConvStateLayout
from pallas_kernels.plan import CopyPlan, blocks_usable, window_moves
from pallas_kernels.pools import Pool, StateKind

_UINT_OF_BITS = {4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}


def move_states(
    leaves: Sequence[jax.Array],
    pools: Sequence[Pool],
    plan: CopyPlan,
    *,
    conv_layout: ConvStateLayout,
    null_block_id: int | None,
) -> list[jax.Array]:
    """Carries out `plan`, row by row, in place on donated leaves.

    The loop visits copying rows only, so the cost follows the copies and not the batch.

    Args:
      leaves: one array per pool.
      pools: their static descriptions.
      plan: ids and offsets, int32 `[R]`.
      conv_layout: layout of the conv pools. Static.
      null_block_id: id that is never copied from or to; None for no such id. Static.

    Returns:
      The leaves after the copies.
    """
    dtypes = [leaf.dtype for leaf in leaves]
    # XLA:CPU would convert a narrow float pool to a wider type and back for each update, which also
    # loses bits, so such a pool is renamed as a whole.
    leaves = [_to_bits(leaf) if leaf.dtype.itemsize == 1 else leaf for leaf in leaves]
    num_rows = plan.live.shape[0]
    copying = jnp.nonzero(plan.live, size=num_rows, fill_value=0)[0].astype(jnp.int32)

    def copy_row(i: jax.Array, leaves: list[jax.Array]) -> list[jax.Array]:
        row = copying[i]
        offset = plan.offset[row]
        moved = []
        for pool, leaf in zip(pools, leaves, strict=True):
            is_conv = pool.kind is StateKind.CONV
            ids = plan.ids[pool.table]
            src, dst = (ids.conv_src if is_conv else ids.temporal_src)[row], ids.dst[row]
            usable = blocks_usable(src, dst, num_blocks=pool.num_blocks, null_block_id=null_block_id)
            source, destination = _read(leaf, pool, src), _read(leaf, pool, dst)
            if is_conv:
                token_axis = source.ndim - 3 + conv_layout.token_axis
                usable &= window_moves(src, dst, offset, source.shape[token_axis])
                source = _shifted(source, destination, offset, token_axis)
            moved.append(_write(leaf, pool, dst, jnp.where(usable, source, destination)))
        return moved

    moved = lax.fori_loop(0, jnp.sum(plan.live, dtype=jnp.int32), copy_row, leaves)
    return [_from_bits(leaf, dtype) for leaf, dtype in zip(moved, dtypes, strict=True)]


def _shifted(source: jax.Array, destination: jax.Array, offset: jax.Array, token_axis: int) -> jax.Array:
    """The source's tokens from `offset` on, then the destination's last `offset` tokens."""
    state_len = source.shape[token_axis]
    window = lax.dynamic_slice_in_dim(jnp.concatenate([source, source], token_axis), offset, state_len, token_axis)
    moved = lax.broadcasted_iota(jnp.int32, window.shape, token_axis) < state_len - offset
    return jnp.where(moved, window, destination)


def _block_index(pool: Pool, block: jax.Array) -> tuple[list[jax.Array], tuple[int, ...]]:
    """Start indices and slice sizes of one block, in all layers of a stacked leaf."""
    block = jnp.clip(block, 0, pool.num_blocks - 1)
    zero = jnp.int32(0)
    lead = [] if pool.num_layers is None else [zero]
    sizes = () if pool.num_layers is None else (pool.num_layers,)
    return [*lead, block, *(zero for _ in pool.block_shape)], (*sizes, 1, *pool.block_shape)


def _read(leaf: jax.Array, pool: Pool, block: jax.Array) -> jax.Array:
    """One block as bits, without its block axis."""
    start, sizes = _block_index(pool, block)
    return jnp.squeeze(_to_bits(lax.dynamic_slice(leaf, start, sizes)), len(sizes) - len(pool.block_shape) - 1)


def _write(leaf: jax.Array, pool: Pool, block: jax.Array, bits: jax.Array) -> jax.Array:
    start, sizes = _block_index(pool, block)
    return lax.dynamic_update_slice(leaf, _from_bits(bits.reshape(sizes), leaf.dtype), start)


def _to_bits(block: jax.Array) -> jax.Array:
    """Unsigned integers of the same bits: float moves on CPU can flush subnormals and quiet NaNs."""
    if jnp.issubdtype(block.dtype, jnp.floating):
        return lax.bitcast_convert_type(block, _UINT_OF_BITS[jnp.finfo(block.dtype).bits])
    return block


def _from_bits(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)
