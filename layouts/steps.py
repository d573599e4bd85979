"""Steps on the host: what each row of a batch does, as a plain NumPy loop, and whether that is well defined."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from layouts.contracts import assert_block_tables, assert_mamba_states
from layouts.conv_state import ConvStateLayout
from layouts.state import is_mamba_state


@dataclasses.dataclass(frozen=True)
class RowStep:
    """What a step does to one live row.

    Attributes:
      row: its place in the batch.
      slot: its place in the request vectors.
      crosses: whether it reaches a boundary (postprocess) or a new running column (preprocess).
      copies: whether states are to be copied.
      offset: tokens by which the conv window shifts.
      conv_col: column of the conv source.
      temporal_col: column of the temporal source.
      dst_col: column of the destination.
      mamba_state_idx: the slot's running column afterwards.
      num_accepted_tokens: the slot's counter afterwards.
    """

    row: int
    slot: int
    crosses: bool
    copies: bool
    offset: int
    conv_col: int
    temporal_col: int
    dst_col: int
    mamba_state_idx: int
    num_accepted_tokens: int


def row_steps(
    inputs: Any,
    *,
    batch: int,
    block_size: int,
    idx_mapping: Any = None,
    num_reqs: int | None = None,
    preserve_accepted: bool = False,
) -> Iterator[RowStep]:
    """Yields a `RowStep` for each live row, in order.

    Args:
      inputs: `PostprocessInputs`, or `PreprocessInputs` (told by `query_start_loc`), of NumPy arrays.
      batch: rows of the block table.
      block_size: tokens per block.
      idx_mapping: int32 `[batch]`, batch row -> slot; None where a row is its own slot.
      num_reqs: rows from this one on are padding.
      preserve_accepted: keep the counter of a row that a `PreprocessInputs` step moves.
    """
    num_slots = len(inputs.mamba_state_idx)
    decide = _decide_preprocess if hasattr(inputs, "query_start_loc") else _decide_postprocess
    for row in range(batch if num_reqs is None else min(int(num_reqs), batch)):
        slot = row if idx_mapping is None else int(idx_mapping[row])
        if 0 <= slot < num_slots:
            # int32 wraps, here as on the device.
            with np.errstate(over="ignore"):
                yield decide(inputs, row, slot, block_size, preserve_accepted)


def _decide_postprocess(inputs: Any, row: int, slot: int, block_size: int, preserve_accepted: bool) -> RowStep:
    computed = np.int32(inputs.num_computed_tokens[slot])
    accepted = np.int32(inputs.num_accepted_tokens[slot])
    src_col = np.int32(inputs.mamba_state_idx[slot])
    if inputs.num_scheduled_tokens is None:
        new = computed
        running = new - accepted + np.int32(1)
    else:
        running = computed + np.int32(inputs.num_scheduled_tokens[slot]) - np.int32(inputs.num_draft_tokens[slot])
        new = running + accepted - np.int32(1)
    boundary = np.int32(int(new) // block_size)
    aligned = boundary * np.int32(block_size)
    crosses = bool(aligned >= running and accepted >= 1 and src_col >= 0 and boundary >= 1)
    offset, dst_col = aligned - running, boundary - np.int32(1)
    return RowStep(
        row=row,
        slot=slot,
        crosses=crosses,
        copies=crosses and bool(src_col != dst_col or offset != 0),
        offset=int(offset),
        conv_col=int(src_col),
        temporal_col=int(src_col + offset),
        dst_col=int(dst_col),
        mamba_state_idx=int(src_col),
        num_accepted_tokens=1 if crosses and src_col == dst_col else int(accepted),
    )


def _decide_preprocess(inputs: Any, row: int, slot: int, block_size: int, preserve_accepted: bool) -> RowStep:
    computed = np.int32(inputs.num_computed_tokens[slot])
    accepted = np.int32(inputs.num_accepted_tokens[slot])
    src_col = np.int32(inputs.mamba_state_idx[slot])
    scheduled = np.int32(inputs.query_start_loc[row + 1]) - np.int32(inputs.query_start_loc[row])
    new_col = int(computed + scheduled - np.int32(1)) // block_size
    offset = max(accepted - np.int32(1), np.int32(0))
    moves = bool(src_col >= 0 and src_col != new_col)
    return RowStep(
        row=row,
        slot=slot,
        crosses=moves,
        copies=moves,
        offset=int(offset),
        conv_col=int(src_col),
        temporal_col=int(src_col + offset),
        dst_col=new_col,
        mamba_state_idx=new_col,
        num_accepted_tokens=1 if moves and not preserve_accepted else int(accepted),
    )


def check_step(
    states: Any,
    inputs: Any,
    block_tables: Any,
    *,
    block_size: int,
    conv_layout: ConvStateLayout | str,
    idx_mapping: Any = None,
    num_reqs: int | None = None,
    null_block_id: int | None = 0,
) -> None:
    """Checks on the host that a step is well defined and points nowhere it should not.

    The operations never read or write out of range, whatever they are given, and do not check what
    this does: that costs a look at every value. Call it when debugging an engine, and in tests, with
    what `postprocess_mamba` or `preprocess_mamba` is about to be given (the options below; the others
    make no difference here), before that call donates the states.

    Dims: S = slots, B = batch, G = groups, C = columns.

    Args:
      states: pytree of `MambaState`; only shapes are read.
      inputs: `PostprocessInputs` or `PreprocessInputs`, int32 `[S]` each.
      block_tables: int32 `[B, C]` or `[G, B, C]`.
      block_size: tokens per block.
      conv_layout: "DS", "SD" or a `ConvStateLayout`.
      idx_mapping: int32 `[B]`, batch row -> slot, negative to skip the row.
      num_reqs: rows from this one on are padding.
      null_block_id: id that is never copied from or to; None for no such id.

    Raises:
      AssertionError (contract): `states` or `block_tables` is malformed.
      ValueError: `block_size` is not positive; a live row has accepted less than 1 token, shares its
        slot with another or has a slot out of range; or a row that copies uses a column outside the
        table or an id out of range, shifts by more than a conv window, or writes a block that another
        row writes or reads. The message lists all of them by row.
    """
    conv_layout = ConvStateLayout.parse(conv_layout)
    assert_mamba_states(states, conv_layout=conv_layout)
    assert_block_tables(block_tables, states)
    if block_size < 1:
        raise ValueError(f"block_size must be positive, got {block_size}")
    inputs = jax.tree.map(np.asarray, inputs)
    idx_mapping = None if idx_mapping is None else np.asarray(idx_mapping)
    tables = np.asarray(block_tables)
    tables = tables[None] if tables.ndim == 2 else tables
    batch = tables.shape[1]
    live = range(batch if num_reqs is None else min(int(num_reqs), batch))
    steps = list(row_steps(inputs, batch=batch, block_size=block_size, idx_mapping=idx_mapping, num_reqs=num_reqs))
    problems = []
    if idx_mapping is not None:
        num_slots = len(inputs.mamba_state_idx)
        problems += [
            f"row {row}: slot {idx_mapping[row]} is outside [0, {num_slots})"
            for row in live
            if idx_mapping[row] >= num_slots
        ]
    rows_of_slot = collections.defaultdict(list)
    for step in steps:
        rows_of_slot[step.slot].append(step.row)
        if inputs.num_accepted_tokens[step.slot] < 1:
            problems.append(f"row {step.row}: num_accepted_tokens is {inputs.num_accepted_tokens[step.slot]}, below 1")
    problems += [f"rows {rows}: all have slot {slot}" for slot, rows in rows_of_slot.items() if len(rows) > 1]
    copying = [step for step in steps if step.copies]
    for kind, table, num_blocks, window in _distinct_pools(states, conv_layout):
        problems += _pool_problems(kind, table, tables[table], num_blocks, window, copying, null_block_id)
    if problems:
        raise ValueError("the step is not well defined:\n  " + "\n  ".join(dict.fromkeys(problems)))


def _distinct_pools(states: Any, conv_layout: ConvStateLayout) -> dict[tuple[str, int, int, int | None], None]:
    """(kind, group, num_blocks, state_len or None) of the pools, each once."""
    found = {}
    for state in jax.tree.leaves(states, is_leaf=is_mamba_state):
        lead = 1 if state.stacked else 0
        for pool in jax.tree.leaves(state.conv):
            found["conv", state.group, pool.shape[lead], pool.shape[lead + conv_layout.token_axis]] = None
        for pool in jax.tree.leaves(state.temporal):
            found["temporal", state.group, pool.shape[lead], None] = None
    return found


def _pool_problems(
    kind: str,
    group: int,
    table: np.ndarray,
    num_blocks: int,
    window: int | None,
    copying: list[RowStep],
    null_block_id: int | None,
) -> Iterator[str]:
    """What is wrong with the copies of one pool."""
    reads, writes = collections.defaultdict(set), collections.defaultdict(set)
    for step in copying:
        columns = {"source": step.conv_col if kind == "conv" else step.temporal_col, "destination": step.dst_col}
        where = f"row {step.row}: {kind}"
        if window is not None and not 0 <= step.offset < window:
            yield f"{where} offset {step.offset} is outside a window of {window} tokens"
            continue
        ids = {}
        for role, column in columns.items():
            if not 0 <= column < table.shape[1]:
                yield f"{where} {role} column {column} is outside a table of {table.shape[1]} columns"
            elif not 0 <= table[step.row, column] < num_blocks:
                yield f"{where} {role} block {table[step.row, column]} is outside [0, {num_blocks}) (group {group})"
            else:
                ids[role] = int(table[step.row, column])
        onto_itself = len(set(ids.values())) == 1 and (kind == "temporal" or step.offset == 0)
        if len(ids) == 2 and null_block_id not in ids.values() and not onto_itself:
            reads[ids["source"]].add(step.row)
            writes[ids["destination"]].add(step.row)
    for block, rows in writes.items():
        if len(rows) > 1:
            yield f"rows {sorted(rows)}: all write {kind} block {block} (group {group})"
        if readers := reads[block] - rows:
            yield f"rows {sorted(readers)}: read {kind} block {block}, which row {min(rows)} writes (group {group})"
