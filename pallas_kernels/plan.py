"""What a step copies: integer arithmetic only, no state is touched here.

One class per operation. Everything is written with operators that take scalars and vectors alike,
so that the XLA path plans a whole batch at once and the Mosaic GPU kernel plans with the same code
in its registers. All arithmetic is int32 and wraps.

An operation sees its request vectors as a list of `values`: first the slot vectors, in slot order
and gathered by `idx_mapping` where there is one, then the row vectors, which are in batch order.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Decision(NamedTuple):
    """What happens to each row.

    Every field has the shape of the vectors it was decided from: `[rows]`, or scalars for one row.

    Attributes:
      copies: bool, whether the row has anything to copy.
      offset: int32, tokens by which the conv window shifts.
      updates: int32 each, the slot vectors that the step changes, after it.
    """

    copies: jax.Array
    offset: jax.Array
    updates: tuple[jax.Array, ...]


class BlockIds(NamedTuple):
    """Physical blocks of a copy, int32; -1 where a column lies outside the table."""

    conv_src: jax.Array
    temporal_src: jax.Array
    dst: jax.Array


class CopyPlan(NamedTuple):
    """The copies of a step.

    Dims: R = rows.

    Attributes:
      ids: `[R]` each, by block table.
      offset: int32 `[R]`, tokens.
      live: bool `[R]`, rows that copy.
    """

    ids: dict[int, BlockIds]
    offset: jax.Array
    live: jax.Array


Values = Sequence[jax.Array]
# Reads a column of the block table of the row(s) at hand: a block id, or -1 outside the table.
LookUp = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Postprocess:
    """Saves the state of rows whose accepted tokens reach a block boundary.

    Slot vectors: mamba_state_idx, num_accepted_tokens, num_computed_tokens, and unless `advanced`
    num_scheduled_tokens and num_draft_tokens. Row vectors: none.

    Attributes:
      block_size: tokens per block.
      advanced: whether num_computed_tokens holds the final count already.
    """

    block_size: int
    advanced: bool
    updated = (1,)

    def decide(self, values: Values, live: jax.Array) -> Decision:
        """Decides rows; `live` is False for padding."""
        copies, offset, src_col, dst_col = self._columns(values)
        crosses = live & copies
        accepted = jnp.where(crosses & (src_col == dst_col), 1, values[1])
        return Decision(crosses & ((src_col != dst_col) | (offset != 0)), offset, (accepted,))

    def block_ids(self, values: Values, table: int, look_up: LookUp) -> BlockIds:
        """Looks up the blocks of rows that copy in their block table."""
        _, offset, src_col, dst_col = self._columns(values)
        return BlockIds(look_up(src_col), look_up(src_col + offset), look_up(dst_col))

    def _columns(self, values: Values) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        src_col, accepted, computed, *counts = values
        if self.advanced:
            new = computed
            running = new - accepted + 1
        else:
            scheduled, draft = counts
            running = computed + scheduled - draft
            new = running + accepted - 1
        # Truncation differs from floor only below zero, where there is no boundary either way.
        boundary = lax.div(new, jnp.int32(self.block_size))
        aligned = boundary * self.block_size
        crosses = (aligned >= running) & (accepted >= 1) & (src_col >= 0) & (boundary >= 1)
        return crosses, aligned - running, src_col, boundary - 1


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """Moves the state of rows whose window starts a new running block, and advances their index.

    Slot vectors: mamba_state_idx, num_accepted_tokens, num_computed_tokens. Row vectors: the start
    and the end of each row's tokens, the two halves of query_start_loc.

    Attributes:
      block_size: tokens per block.
      preserve_accepted: whether the counter survives a move.
    """

    block_size: int
    preserve_accepted: bool
    updated = (0, 1)

    def decide(self, values: Values, live: jax.Array) -> Decision:
        """Decides rows; `live` is False for padding."""
        moves, offset, src_col, new_col = self._columns(values)
        moves &= live
        accepted = values[1] if self.preserve_accepted else jnp.where(moves, 1, values[1])
        return Decision(moves, offset, (jnp.where(live, new_col, src_col), accepted))

    def block_ids(self, values: Values, table: int, look_up: LookUp) -> BlockIds:
        """Looks up the blocks of rows that copy in their block table."""
        _, offset, src_col, new_col = self._columns(values)
        return BlockIds(look_up(src_col), look_up(src_col + offset), look_up(new_col))

    def _columns(self, values: Values) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        src_col, accepted, computed, start, end = values
        last = computed + (end - start) - 1
        block_size = jnp.int32(self.block_size)
        new_col = lax.div(last, block_size) - jnp.where(lax.rem(last, block_size) < 0, 1, 0)
        return (src_col >= 0) & (src_col != new_col), jnp.maximum(accepted - 1, 0), src_col, new_col


@dataclasses.dataclass(frozen=True)
class CopyBlocks:
    """Copies between blocks that the caller names.

    Slot vectors: none. Row vectors: the source blocks for each table, the destination blocks for each,
    the temporal source blocks for each if `has_temporal_src`, the token offsets if `has_offsets`.

    Attributes:
      tables: which sets of ids some state uses.
      has_temporal_src: whether temporal states have sources of their own.
      has_offsets: whether conv windows shift.
    """

    tables: tuple[int, ...]
    has_temporal_src: bool
    has_offsets: bool
    updated = ()

    def decide(self, values: Values, live: jax.Array) -> Decision:
        """Decides rows; `live` is False for padding."""
        offset = values[-1] if self.has_offsets else values[0] * 0
        moves = offset != 0
        for table in self.tables:
            ids = self.block_ids(values, table)
            moves |= (ids.conv_src != ids.dst) | (ids.temporal_src != ids.dst)
        return Decision(live & moves, offset, ())

    def block_ids(self, values: Values, table: int, look_up: LookUp | None = None) -> BlockIds:
        """The ids as they were given."""
        index, stride = self.tables.index(table), len(self.tables)
        conv_src, dst = values[index], values[stride + index]
        return BlockIds(conv_src, values[2 * stride + index] if self.has_temporal_src else conv_src, dst)


Operation = Postprocess | Preprocess | CopyBlocks


def guarded(block_of: Callable[[jax.Array], jax.Array], num_columns: int) -> LookUp:
    """Returns a look-up that reads through `block_of` inside the table only."""

    def look_up(column: jax.Array) -> jax.Array:
        inside = (column >= 0) & (column < num_columns)
        return jnp.where(inside, block_of(jnp.where(inside, column, 0)), -1)

    return look_up


def window_moves(src: jax.Array, dst: jax.Array, offset: jax.Array, state_len: int) -> jax.Array:
    """Whether a copy between two usable blocks moves anything; a temporal block is a window of one token."""
    return (offset >= 0) & (offset < state_len) & ((src != dst) | (offset != 0))


def blocks_usable(src: jax.Array, dst: jax.Array, *, num_blocks: int, null_block_id: int | None) -> jax.Array:
    """Whether both ids name a block of the pool, neither of them the null block."""
    usable = (src >= 0) & (src < num_blocks) & (dst >= 0) & (dst < num_blocks)
    if null_block_id is not None:
        usable &= (src != null_block_id) & (dst != null_block_id)
    return usable


@dataclasses.dataclass(frozen=True)
class View:
    """A row vector as a piece of a flat array: `arrays[array][start : start + length]`."""

    array: int
    start: int
    length: int


class Request(NamedTuple):
    """The index arrays of a call, int32.

    Dims: S = slots, R = rows of the batch, G = block tables, C = columns.

    Attributes:
      slot_vectors: `[S]` each.
      row_arrays: flat arrays that `View`s cut the row vectors from.
      block_tables: `[G, R, C]`, or None where ids are given.
      idx_mapping: `[R]`, or None where a row is its own slot.
      num_reqs: scalar: rows from this one on are padding. None where there are none.
    """

    slot_vectors: tuple[jax.Array, ...]
    row_arrays: tuple[jax.Array, ...]
    block_tables: jax.Array | None
    idx_mapping: jax.Array | None
    num_reqs: jax.Array | None


def decide_step(
    operation: Operation, request: Request, views: Sequence[View], *, num_rows: int
) -> tuple[list[jax.Array], Decision, tuple[jax.Array, ...]]:
    """Decides a whole batch.

    Args:
      operation: what to do. Static.
      request: the index arrays.
      views: the row vectors in `request.row_arrays`. Static.
      num_rows: rows of the batch. Static.

    Returns:
      The operation's values and its decision, `[R]`, and the slot vectors that it updates, `[S]`.
    """
    live = jnp.arange(num_rows, dtype=jnp.int32) < (num_rows if request.num_reqs is None else request.num_reqs)
    if request.idx_mapping is None:
        of_rows = [vector[:num_rows] for vector in request.slot_vectors]
    else:
        num_slots = request.slot_vectors[0].shape[0]
        live &= (request.idx_mapping >= 0) & (request.idx_mapping < num_slots)
        of_rows = gather_slots(request.slot_vectors, request.idx_mapping)
    values = [*of_rows, *(request.row_arrays[view.array][view.start : view.start + view.length] for view in views)]
    decision = operation.decide(values, live)
    updated = []
    for index, update in zip(operation.updated, decision.updates, strict=True):
        vector = request.slot_vectors[index]
        if request.idx_mapping is None:
            updated.append(lax.dynamic_update_slice(vector, update, (0,)))
        else:
            updated.append(vector.at[jnp.where(live, request.idx_mapping, num_slots)].set(update, mode="drop"))
    return values, decision, tuple(updated)


def plan_copies(operation: Operation, request: Request, values: Values, decision: Decision) -> CopyPlan:
    """Looks up the blocks of a decided batch, in every block table or set of ids."""
    rows = jnp.arange(decision.copies.shape[0])
    if request.block_tables is None:
        ids = {table: operation.block_ids(values, table) for table in operation.tables}
    else:
        num_tables, _, num_columns = request.block_tables.shape
        ids = {
            table: operation.block_ids(
                values,
                table,
                guarded(lambda column, table=table: request.block_tables[table, rows, column], num_columns),
            )
            for table in range(num_tables)
        }
    return CopyPlan(ids, decision.offset, decision.copies)


def gather_slots(slot_vectors: Sequence[jax.Array], idx_mapping: jax.Array) -> list[jax.Array]:
    """Brings slot vectors into batch order; rows without a slot get some slot's values, and are not live."""
    slot = jnp.clip(idx_mapping, 0, slot_vectors[0].shape[0] - 1)
    return [vector[slot] for vector in slot_vectors]
