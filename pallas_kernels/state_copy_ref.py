"""The oracle: a plain NumPy loop over rows. Shares no code with the planner or the movers.

It favours being obviously right over speed, and works on copies: nothing is updated in place.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from layouts import ConvStateLayout, MambaState
from pallas_kernels.inputs import PostprocessInputs


def postprocess_mamba_ref(
    states: Any,
    inputs: PostprocessInputs,
    block_tables: Any,
    *,
    block_size: int,
    conv_layout: ConvStateLayout | str,
    num_reqs: int | None = None,
    null_block_id: int | None = 0,
) -> tuple[Any, np.ndarray]:
    """`postprocess_mamba` on the host, one row at a time, same arguments and results as NumPy arrays.

    Dims: S = slots, B = batch, G = groups, C = columns.

    Args:
      states: pytree of `MambaState` with arrays that NumPy can read.
      inputs: int32 `[S]` each.
      block_tables: int32 `[B, C]` or `[G, B, C]`.
      block_size: tokens per block. Static.
      conv_layout: "DS", "SD" or a `ConvStateLayout`. Static.
      num_reqs: rows from this one on are padding.
      null_block_id: id that is never copied from or to; None for no such id. Static.

    Returns:
      New states and the new `num_accepted_tokens`, int32 `[S]`.
    """
    states = jax.tree.map(np.array, states)
    tables = np.asarray(block_tables)
    tables = tables[None] if tables.ndim == 2 else tables
    counter_out = np.array(inputs.num_accepted_tokens)
    live_rows = tables.shape[1] if num_reqs is None else min(int(num_reqs), tables.shape[1])
    with np.errstate(over="ignore"):
        for row in range(live_rows):
            computed = np.int32(inputs.num_computed_tokens[row])
            accepted = np.int32(inputs.num_accepted_tokens[row])
            src_col = np.int32(inputs.mamba_state_idx[row])
            if inputs.num_scheduled_tokens is None:
                new = computed
                running = new - accepted + np.int32(1)
            else:
                scheduled = np.int32(inputs.num_scheduled_tokens[row])
                draft = np.int32(inputs.num_draft_tokens[row])
                running = computed + scheduled - draft
                new = running + accepted - np.int32(1)
            boundary = np.int32(int(new) // block_size)
            aligned = boundary * np.int32(block_size)
            if aligned < running or accepted < 1 or src_col < 0 or boundary < 1:
                continue
            offset = aligned - running
            dst_col = boundary - np.int32(1)
            if src_col == dst_col:
                counter_out[row] = 1
                if offset == 0:
                    continue
            _copy_row(
                states,
                tables[:, row],
                columns=(int(src_col), int(src_col + offset), int(dst_col)),
                offset=int(offset),
                conv_layout=ConvStateLayout(conv_layout),
                null_block_id=null_block_id,
            )
    return states, counter_out


def _copy_row(
    states: Any,
    tables: np.ndarray,
    *,
    columns: tuple[int, int, int],
    offset: int,
    conv_layout: ConvStateLayout,
    null_block_id: int | None,
) -> None:
    """Copies one row in every state; `columns` are those of the conv source, temporal source and destination."""

    def block(table: np.ndarray, column: int, num_blocks: int) -> int | None:
        if not 0 <= column < len(table):
            return None
        block_id = int(table[column])
        return block_id if 0 <= block_id < num_blocks and block_id != null_block_id else None

    for state in jax.tree.leaves(states, is_leaf=lambda node: isinstance(node, MambaState)):
        table = tables[state.group]
        for field in dataclasses.fields(MambaState)[:2]:
            for pool in jax.tree.leaves(getattr(state, field.name)):
                for layer in pool if state.stacked else [pool]:
                    src = block(table, columns[0 if field.name == "conv" else 1], len(layer))
                    dst = block(table, columns[2], len(layer))
                    if src is None or dst is None:
                        continue
                    if field.name == "temporal":
                        layer[dst] = layer[src].copy()
                    elif offset >= 0:
                        window = layer[src].copy()
                        if conv_layout is ConvStateLayout.DS:
                            layer[dst, :, : max(window.shape[1] - offset, 0)] = window[:, offset:]
                        else:
                            layer[dst, : max(window.shape[0] - offset, 0)] = window[offset:]
