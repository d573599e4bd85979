"""What a step copies: integer arithmetic only, no state is touched here.

Everything is written with operators that take scalars and vectors alike, so that the XLA path
plans a whole batch at once and the Mosaic GPU kernel plans with the same code in its registers.
All arithmetic is int32 and wraps.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.inputs import PostprocessInputs


class Decision(NamedTuple):
    """What happens to each batch row, in columns of its block table.

    Every field has the shape of the vectors it was decided from: `[rows]`, or scalars for one row.

    Attributes:
      copies: bool, whether the row has anything to copy.
      offset: int32, tokens by which the conv window shifts, and columns that the temporal source
        lies beyond `src_col`.
      src_col: int32, column of the conv source.
      dst_col: int32, column of both destinations.
      num_accepted_tokens: int32, the counter after the step.
    """

    copies: jax.Array
    offset: jax.Array
    src_col: jax.Array
    dst_col: jax.Array
    num_accepted_tokens: jax.Array


class BlockIds(NamedTuple):
    """Physical blocks of a copy, int32; -1 where the column lies outside the table."""

    conv_src: jax.Array
    temporal_src: jax.Array
    dst: jax.Array


class CopyPlan(NamedTuple):
    """The copies of a step.

    Dims: G = block tables, R = rows.

    Attributes:
      ids: `[G, R]` each.
      offset: int32 `[R]`, tokens.
      live: bool `[R]`, rows that copy.
    """

    ids: BlockIds
    offset: jax.Array
    live: jax.Array


def decide_postprocess(inputs: PostprocessInputs, live: jax.Array, *, block_size: int) -> Decision:
    """Decides which rows save their state at a block boundary.

    Args:
      inputs: int32 vectors `[rows]`, or scalars.
      live: bool of the same shape: False for padding.
      block_size: tokens per block. Static.
    """
    accepted = inputs.num_accepted_tokens
    if inputs.num_scheduled_tokens is None:
        new = inputs.num_computed_tokens
        running = new - accepted + 1
    else:
        running = inputs.num_computed_tokens + inputs.num_scheduled_tokens - inputs.num_draft_tokens
        new = running + accepted - 1
    # Truncation differs from floor only below zero, where there is no boundary either way.
    boundary = lax.div(new, jnp.int32(block_size))
    aligned = boundary * block_size
    src_col = inputs.mamba_state_idx
    dst_col = boundary - 1
    offset = aligned - running
    crosses = live & (aligned >= running) & (accepted >= 1) & (src_col >= 0) & (boundary >= 1)
    return Decision(
        copies=crosses & ((src_col != dst_col) | (offset != 0)),
        offset=offset,
        src_col=src_col,
        dst_col=dst_col,
        num_accepted_tokens=jnp.where(crosses & (src_col == dst_col), 1, accepted),
    )


def look_up_blocks(decision: Decision, block_of: Callable[[jax.Array], jax.Array], num_columns: int) -> BlockIds:
    """Turns columns into block ids.

    Args:
      decision: of one row or of all rows.
      block_of: reads the block table at columns that are inside it.
      num_columns: columns of the table, at least 1. Static.
    """

    def block_at(column: jax.Array) -> jax.Array:
        inside = (column >= 0) & (column < num_columns)
        return jnp.where(inside, block_of(jnp.where(inside, column, 0)), -1)

    return BlockIds(
        conv_src=block_at(decision.src_col),
        temporal_src=block_at(decision.src_col + decision.offset),
        dst=block_at(decision.dst_col),
    )


def conv_copies(src: jax.Array, dst: jax.Array, offset: jax.Array, state_len: int) -> jax.Array:
    """Whether a conv copy between two usable blocks moves anything."""
    return (offset >= 0) & (offset < state_len) & ((src != dst) | (offset != 0))


def blocks_usable(src: jax.Array, dst: jax.Array, *, num_blocks: int, null_block_id: int | None) -> jax.Array:
    """Whether both ids name a block of the pool, neither of them the null block."""
    usable = (src >= 0) & (src < num_blocks) & (dst >= 0) & (dst < num_blocks)
    if null_block_id is not None:
        usable &= (src != null_block_id) & (dst != null_block_id)
    return usable
