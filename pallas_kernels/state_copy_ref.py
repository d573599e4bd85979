"""The oracle: plain NumPy loops over rows. Shares no code with the planner or the movers.

It favours being obviously right over speed, and works on copies: nothing is updated in place.
"""

from typing import Any

import jax
import numpy as np

from layouts import ConvStateLayout, is_mamba_state, row_steps
from pallas_kernels.inputs import PostprocessInputs, PreprocessInputs


def postprocess_mamba_ref(
    states: Any,
    inputs: PostprocessInputs,
    block_tables: Any,
    *,
    block_size: int,
    conv_layout: ConvStateLayout | str,
    idx_mapping: Any = None,
    num_reqs: int | None = None,
    null_block_id: int | None = 0,
) -> tuple[Any, np.ndarray]:
    """`postprocess_mamba` on the host: same arguments, NumPy results.

    Dims: S = slots.

    Returns:
      New states and the new `num_accepted_tokens`, int32 `[S]`.
    """
    states, _, accepted = _run_steps(
        states, inputs, block_tables, block_size, conv_layout, idx_mapping, num_reqs, null_block_id
    )
    return states, accepted


def preprocess_mamba_ref(
    states: Any,
    inputs: PreprocessInputs,
    block_tables: Any,
    *,
    block_size: int,
    conv_layout: ConvStateLayout | str,
    preserve_accepted: bool = False,
    idx_mapping: Any = None,
    num_reqs: int | None = None,
    null_block_id: int | None = 0,
) -> tuple[Any, np.ndarray, np.ndarray]:
    """`preprocess_mamba` on the host: same arguments, NumPy results.

    Dims: S = slots.

    Returns:
      New states, the new `mamba_state_idx` and the new `num_accepted_tokens`, int32 `[S]` each.
    """
    return _run_steps(
        states,
        inputs,
        block_tables,
        block_size,
        conv_layout,
        idx_mapping,
        num_reqs,
        null_block_id,
        preserve_accepted=preserve_accepted,
    )


def copy_mamba_blocks_ref(
    states: Any,
    src_blocks: Any,
    dst_blocks: Any,
    token_offsets: Any = None,
    temporal_src_blocks: Any = None,
    *,
    conv_layout: ConvStateLayout | str,
    num_copies: int | None = None,
    null_block_id: int | None = 0,
) -> Any:
    """`copy_mamba_blocks` on the host: same arguments, NumPy results."""
    states = jax.tree.map(np.array, states)
    temporal_src_blocks = src_blocks if temporal_src_blocks is None else temporal_src_blocks
    conv_src, dst, temporal_src = (np.atleast_2d(ids) for ids in (src_blocks, dst_blocks, temporal_src_blocks))
    num_rows = conv_src.shape[1]
    for row in range(num_rows if num_copies is None else min(int(num_copies), num_rows)):
        _copy_row(
            states,
            [(int(conv_src[g, row]), int(temporal_src[g, row]), int(dst[g, row])) for g in range(len(conv_src))],
            offset=0 if token_offsets is None else int(token_offsets[row]),
            conv_layout=ConvStateLayout(conv_layout),
            null_block_id=null_block_id,
        )
    return states


def _run_steps(
    states: Any,
    inputs: Any,
    block_tables: Any,
    block_size: int,
    conv_layout: ConvStateLayout | str,
    idx_mapping: Any,
    num_reqs: int | None,
    null_block_id: int | None,
    *,
    preserve_accepted: bool = False,
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Copies row by row and updates the rows' slots."""
    states = jax.tree.map(np.array, states)
    inputs = jax.tree.map(np.asarray, inputs)
    tables = np.asarray(block_tables)
    tables = tables[None] if tables.ndim == 2 else tables
    state_idx, accepted = inputs.mamba_state_idx.copy(), inputs.num_accepted_tokens.copy()

    def block_id(group: int, row: int, column: int) -> int:
        return int(tables[group, row, column]) if 0 <= column < tables.shape[2] else -1

    for step in row_steps(
        inputs,
        batch=tables.shape[1],
        block_size=block_size,
        idx_mapping=idx_mapping,
        num_reqs=num_reqs,
        preserve_accepted=preserve_accepted,
    ):
        state_idx[step.slot], accepted[step.slot] = step.mamba_state_idx, step.num_accepted_tokens
        if step.copies:
            columns = (step.conv_col, step.temporal_col, step.dst_col)
            _copy_row(
                states,
                [tuple(block_id(g, step.row, column) for column in columns) for g in range(len(tables))],
                offset=step.offset,
                conv_layout=ConvStateLayout(conv_layout),
                null_block_id=null_block_id,
            )
    return states, state_idx, accepted


def _copy_row(
    states: Any,
    ids: list[tuple[int, int, int]],
    *,
    offset: int,
    conv_layout: ConvStateLayout,
    null_block_id: int | None,
) -> None:
    """Copies one row in every state; `ids` are the conv source, temporal source and destination per group."""
    for state in jax.tree.leaves(states, is_leaf=is_mamba_state):
        conv_src, temporal_src, dst = ids[state.group]
        for pools, src, is_conv in ((state.conv, conv_src, True), (state.temporal, temporal_src, False)):
            for pool in jax.tree.leaves(pools):
                for layer in pool if state.stacked else [pool]:
                    if not (0 <= src < len(layer) and 0 <= dst < len(layer)) or null_block_id in (src, dst):
                        continue
                    block = layer[src].copy()
                    if not is_conv:
                        layer[dst] = block
                    elif offset >= 0 and conv_layout is ConvStateLayout.DS:
                        layer[dst, :, : max(block.shape[1] - offset, 0)] = block[:, offset:]
                    elif offset >= 0:
                        layer[dst, : max(block.shape[0] - offset, 0)] = block[offset:]
