"""The public operations: check the arguments, say what is to be done, and let `dispatch` run it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from layouts import (
    ConvStateLayout,
    assert_block_ids,
    assert_block_tables,
    assert_int32_vector,
    assert_mamba_states,
    assert_request_arrays,
)
from pallas_kernels.config import KernelConfig
from pallas_kernels.dispatch import INT32_MAX, check_block_size, int32_count, is_static_int, make_options, run
from pallas_kernels.inputs import PostprocessInputs, PreprocessInputs
from pallas_kernels.plan import CopyBlocks, Postprocess, Preprocess, Request, View
from pallas_kernels.pools import used_groups


def postprocess_mamba(
    states: Any,
    inputs: PostprocessInputs,
    block_tables: jax.Array,
    *,
    block_size: int,
    conv_layout: ConvStateLayout | str,
    idx_mapping: jax.Array | None = None,
    num_reqs: jax.Array | int | None = None,
    null_block_id: int | None = 0,
    implementation: str | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
    config: KernelConfig | None = None,
) -> tuple[Any, jax.Array]:
    """Saves the Mamba state of every request that crossed a block boundary, and resets its counter.

    For use in align mode (prefix caching of Mamba state) after speculative tokens were verified. A
    row crosses when its accepted tokens reach a multiple of `block_size`; then the conv window,
    shifted to that boundary, and the temporal checkpoint of that boundary are copied into the
    boundary's block, in all layers, in one launch and without a host sync. Of several boundaries
    only the last is saved. A copy is skipped where a column it uses lies outside the table or an id
    outside the pool; nothing out of range is read or written. Results are defined when no block that
    a row writes is read or written by another row, and every byte outside the destinations stays as
    it was.

    Dims: S = slots, B = batch, G = groups, C = columns, N = num_blocks, D = dim, L = state_len.

    Args:
      states: pytree of `MambaState`; None entries pass through. conv `[N, D, L]` (DS) or `[N, L, D]`
        (SD), temporal `[N, ...]`; any dtype. Array leaves are donated; `jax.Ref` leaves are updated in
        place.
      inputs: `PostprocessInputs` of int32 `[S]` each, in slot order; S >= B without an `idx_mapping`.
      block_tables: int32 `[B, C]`, or `[G, B, C]` with one table per `MambaState.group`: block id of
        each column of `block_size` tokens.
      block_size: tokens per block, 1 <= block_size < 2**31. Static.
      conv_layout: "DS", "SD" or a `ConvStateLayout`. Static.
      idx_mapping: int32 `[B]`, batch row -> slot, negative to skip the row; live rows have distinct
        slots. Default: row i is slot i.
      num_reqs: integer scalar, traced or not: rows from this one on are padding. Default: all live.
      null_block_id: a block id never copied from or to; None for no such id. vLLM has no such rule
        and copies its null block: pass None to do the same. Static.
      implementation: None (the Mosaic GPU kernel where it can run, else XLA: see
        `select_implementation`), "mosaic_gpu" or "xla". Static.
      interpret: run the kernel in the Pallas GPU interpreter: True (with race detection) or
        `InterpretGPUParams`. Implies "mosaic_gpu". Its threads do not see the context manager
        `jax.enable_x64`, so 64-bit mode must be on in all threads: `jax_enable_x64`. Static.
      config: `KernelConfig` of the kernel. Static.

    Returns:
      `(states, num_accepted_tokens)`: the states (aliases of the donated arrays, the same Refs) and
      the counters after the step as a new int32 `[S]` array: 1 where a row crossed a boundary and
      its source and destination column are the same, else as before.

    Raises:
      AssertionError (contract): an argument has the wrong rank, shape or type, or `states` holds
        something other than MambaStates.
      ValueError: a static is out of range; one of the two optional counts is missing; an array
        appears twice in `states`; `interpret` with "xla".
      NotImplementedError: the kernel was named, and a leaf or the GPU rules it out, with the reason;
        `vmap`. Compiled for another kind of device, the named kernel gives JAX's own ValueError.

    The semantics are those of vLLM's `postprocess_mamba_fused_kernel` (vllm-project/vllm#45473).
    """
    options = make_options(conv_layout, null_block_id, implementation, interpret, config)
    assert_mamba_states(states, conv_layout=options.conv_layout)
    assert_block_tables(block_tables, states)
    if not isinstance(inputs, PostprocessInputs):
        raise ValueError(f"inputs must be a PostprocessInputs, got {type(inputs).__name__}")
    if (inputs.num_scheduled_tokens is None) != (inputs.num_draft_tokens is None):
        raise ValueError("inputs.num_scheduled_tokens and inputs.num_draft_tokens must both be given, or neither")
    advanced = inputs.num_scheduled_tokens is None
    vectors = dict(vars(inputs))
    if advanced:
        del vectors["num_scheduled_tokens"], vectors["num_draft_tokens"]
    operation = Postprocess(check_block_size(block_size), advanced)
    request, batch = _step_request(vectors, block_tables, idx_mapping, num_reqs)
    states, (accepted,) = run(states, operation, request, (), options, num_rows=batch)
    return states, accepted


def preprocess_mamba(
    states: Any,
    inputs: PreprocessInputs,
    block_tables: jax.Array,
    *,
    block_size: int,
    conv_layout: ConvStateLayout | str,
    preserve_accepted: bool = False,
    idx_mapping: jax.Array | None = None,
    num_reqs: jax.Array | int | None = None,
    null_block_id: int | None = 0,
    implementation: str | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
    config: KernelConfig | None = None,
) -> tuple[Any, jax.Array, jax.Array]:
    """Moves the Mamba state of every request into the block its next tokens run in, and advances its index.

    For use in align mode before the forward pass. The running column of a row becomes the one of its
    last scheduled token. Where that is another column than before, the accepted state (conv window
    shifted by the accepted drafts, temporal checkpoint after them) is copied there, in all layers, in
    the same launch that advances `mamba_state_idx` and the counter; vLLM needs two.

    Dims: S = slots, B = batch, G = groups, C = columns, N = num_blocks, D = dim, L = state_len.

    Args:
      states: as in `postprocess_mamba`.
      inputs: `PreprocessInputs`: int32 `[S]` in slot order, but `query_start_loc` `[B + 1]` in batch order.
      block_tables: int32 `[B, C]`, or `[G, B, C]`, in batch order.
      block_size: tokens per block, 1 <= block_size < 2**31. Static.
      conv_layout: "DS", "SD" or a `ConvStateLayout`. Static.
      preserve_accepted: keep the counter of a row that was moved, instead of making it 1. Static.
      idx_mapping: as in `postprocess_mamba`.
      num_reqs: as in `postprocess_mamba`.
      null_block_id: as in `postprocess_mamba`. Static.
      implementation: as in `postprocess_mamba`. Static.
      interpret: as in `postprocess_mamba`. Static.
      config: as in `postprocess_mamba`. Static.

    Returns:
      `(states, mamba_state_idx, num_accepted_tokens)`: the states (aliases of the donated arrays, the
      same Refs) and two new int32 `[S]` arrays; slots of rows that are not live keep their values.

    Raises:
      AssertionError (contract): an argument has the wrong rank, shape or type, or `states` holds
        something other than MambaStates.
      ValueError: a static is out of range; an array appears twice in `states`; `interpret` with "xla".
      NotImplementedError: the kernel was named, and a leaf or the GPU rules it out, with the reason;
        `vmap`. Compiled for another kind of device, the named kernel gives JAX's own ValueError.

    The semantics are those of vLLM's pre-copy (vllm-project/vllm#49291).
    """
    options = make_options(conv_layout, null_block_id, implementation, interpret, config)
    assert_mamba_states(states, conv_layout=options.conv_layout)
    assert_block_tables(block_tables, states)
    if not isinstance(inputs, PreprocessInputs):
        raise ValueError(f"inputs must be a PreprocessInputs, got {type(inputs).__name__}")
    if not isinstance(preserve_accepted, bool):
        raise ValueError(f"preserve_accepted must be a bool, got {preserve_accepted!r}")
    vectors = dict(vars(inputs))
    query_start_loc = vectors.pop("query_start_loc")
    operation = Preprocess(check_block_size(block_size), preserve_accepted)
    request, batch = _step_request(vectors, block_tables, idx_mapping, num_reqs)
    assert_int32_vector(query_start_loc, "inputs.query_start_loc", ("batch + 1", batch + 1))
    request = request._replace(row_arrays=(query_start_loc,))
    starts_and_ends = (View(array=0, start=0, length=batch), View(array=0, start=1, length=batch))
    states, (state_idx, accepted) = run(states, operation, request, starts_and_ends, options, num_rows=batch)
    return states, state_idx, accepted


def copy_mamba_blocks(
    states: Any,
    src_blocks: jax.Array,
    dst_blocks: jax.Array,
    token_offsets: jax.Array | None = None,
    temporal_src_blocks: jax.Array | None = None,
    *,
    conv_layout: ConvStateLayout | str,
    num_copies: jax.Array | int | None = None,
    null_block_id: int | None = 0,
    implementation: str | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
    config: KernelConfig | None = None,
) -> Any:
    """Copies Mamba states between blocks that the caller names, in all layers, in one launch.

    For engines with slot pools rather than block tables, copy-on-write and snapshots. A conv copy is
    nothing where its ids are equal and the offset is 0, a temporal copy where its ids are equal; ids
    outside the pool and the null block are padding.

    Dims: R = rows, G = groups.

    Args:
      states: as in `postprocess_mamba`.
      src_blocks: int32 `[R]`, or `[G, R]` with ids per `MambaState.group`: source blocks.
      dst_blocks: int32, shape of `src_blocks`: destination blocks, distinct and not read by another row.
      token_offsets: int32 `[R]`, tokens by which conv windows shift; a negative one skips the conv
        copy. Default: 0.
      temporal_src_blocks: int32, shape of `src_blocks`: sources of the temporal states. Default:
        `src_blocks`.
      conv_layout: "DS", "SD" or a `ConvStateLayout`. Static.
      num_copies: integer scalar, traced or not: rows from this one on are padding. Default: all live.
      null_block_id: as in `postprocess_mamba`. Static.
      implementation: as in `postprocess_mamba`. Static.
      interpret: as in `postprocess_mamba`. Static.
      config: as in `postprocess_mamba`. Static.

    Returns:
      The states: aliases of the donated arrays, the same Refs.

    Raises:
      AssertionError (contract): an argument has the wrong rank, shape or type, or `states` holds
        something other than MambaStates.
      ValueError: a static is out of range; an array appears twice in `states`; `interpret` with "xla".
      NotImplementedError: the kernel was named, and a leaf or the GPU rules it out, with the reason;
        `vmap`. Compiled for another kind of device, the named kernel gives JAX's own ValueError.
    """
    options = make_options(conv_layout, null_block_id, implementation, interpret, config)
    assert_mamba_states(states, conv_layout=options.conv_layout)
    ids = {"src_blocks": src_blocks, "dst_blocks": dst_blocks}
    if temporal_src_blocks is not None:
        ids["temporal_src_blocks"] = temporal_src_blocks
    for name, array in ids.items():
        assert_block_ids(array, name, states, like=src_blocks)
    num_rows = src_blocks.shape[-1]
    row_arrays = [array.reshape(-1) for array in ids.values()]
    tables = used_groups(states)
    views = [View(array, table * num_rows, num_rows) for array in range(len(ids)) for table in tables]
    if token_offsets is not None:
        assert_int32_vector(token_offsets, "token_offsets", ("num_rows", num_rows))
        views.append(View(len(row_arrays), 0, num_rows))
        row_arrays.append(token_offsets)
    num_reqs = int32_count(num_copies, num_rows, "num_copies")
    if not tables:
        return states
    operation = CopyBlocks(
        tables, has_temporal_src=temporal_src_blocks is not None, has_offsets=token_offsets is not None
    )
    request = Request((), tuple(row_arrays), block_tables=None, idx_mapping=None, num_reqs=num_reqs)
    states, _ = run(states, operation, request, views, options, num_rows=num_rows)
    return states


def aligned_state_indices(
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    block_size: int,
    num_state_slots: int,
    null_block_id: int | None = 0,
) -> jax.Array:
    """Returns the blocks that a forward pass in align mode writes its checkpoints to.

    Dims: B = batch, G = groups, C = columns, K = num_state_slots.

    Args:
      block_tables: int32 `[B, C]` or `[G, B, C]`.
      seq_lens: int32 `[B]`, tokens up to the step's last one: computed plus scheduled, drafts included.
      block_size: tokens per block, 1 <= block_size < 2**31. Static.
      num_state_slots: columns from the running one on, usually 1 + num_spec. Static.
      null_block_id: what columns beyond the table give, any int32; 0 if None. Static.

    Returns:
      int32 `[B, K]` or `[G, B, K]`: the ids at columns `max((seq_len - 1) // block_size, 0) + 0..K-1`.

    Raises:
      AssertionError (contract): an argument has the wrong rank, shape or type.
      ValueError: a static is out of range.
    """
    block_size = check_block_size(block_size)
    if not is_static_int(num_state_slots) or not 1 <= num_state_slots <= INT32_MAX:
        raise ValueError(f"num_state_slots must be a positive int32, got {num_state_slots!r}")
    null_block_id = 0 if null_block_id is None else null_block_id
    if not is_static_int(null_block_id) or not -INT32_MAX - 1 <= null_block_id <= INT32_MAX:
        raise ValueError(f"null_block_id must be an int32 or None, got {null_block_id!r}")
    assert_block_tables(block_tables, None)
    batch, num_columns = block_tables.shape[-2:]
    assert_int32_vector(seq_lens, "seq_lens", ("batch", batch))
    first = jnp.maximum((seq_lens - 1) // block_size, 0)
    column = first[:, None] + jnp.arange(num_state_slots, dtype=jnp.int32)
    # A column that wraps is beyond any table too.
    inside = (column >= 0) & (column < num_columns)
    null = jnp.int32(null_block_id)
    if num_columns == 0:
        return jnp.full((*block_tables.shape[:-2], *column.shape), null)
    at = jnp.broadcast_to(jnp.where(inside, column, 0), (*block_tables.shape[:-2], *column.shape))
    return jnp.where(inside, jnp.take_along_axis(block_tables, at, axis=-1), null)


def _step_request(
    vectors: dict[str, Any], block_tables: jax.Array, idx_mapping: jax.Array | None, num_reqs: jax.Array | int | None
) -> tuple[Request, int]:
    """Asserts what both steps are given besides states; returns it as a request, and the batch size."""
    batch = block_tables.shape[-2]
    named = {f"inputs.{name}": vector for name, vector in vectors.items()}
    assert_request_arrays(named, min_slots=batch if idx_mapping is None else 0)
    if idx_mapping is not None:
        assert_int32_vector(idx_mapping, "idx_mapping", ("batch", batch))
    request = Request(
        slot_vectors=tuple(vectors.values()),
        row_arrays=(),
        block_tables=block_tables if len(block_tables.shape) == 3 else block_tables[None],
        idx_mapping=idx_mapping,
        num_reqs=int32_count(num_reqs, batch, "num_reqs"),
    )
    return request, batch
