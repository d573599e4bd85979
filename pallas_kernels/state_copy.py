"""The public operations: check, normalise, then one jitted call that plans and moves."""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from layouts import (
    ConvStateLayout,
    assert_block_tables,
    assert_integer_scalar,
    assert_mamba_states,
    assert_request_arrays,
)
from pallas_kernels import state_copy_mgpu, state_copy_xla
from pallas_kernels.config import KernelConfig
from pallas_kernels.inputs import PostprocessInputs
from pallas_kernels.plan import BlockIds, CopyPlan, decide_postprocess, look_up_blocks
from pallas_kernels.pools import Pool, flatten_pools
from pallas_kernels.selection import MOSAIC_GPU, XLA, choose, target_device

_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class _Statics:
    """All that a trace of an operation depends on besides shapes and types."""

    block_size: int
    conv_layout: ConvStateLayout
    null_block_id: int | None
    implementation: str
    interpret: plgpu.InterpretGPUParams | None
    config: KernelConfig
    num_ctas: int


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
    boundary's block, in all layers, in one launch and without a host sync. A copy is skipped where
    a column it uses lies outside the table or an id outside the pool; nothing out of range is
    read or written. Results are defined when no block that a row writes is read or written by
    another row, and every byte outside the destinations stays as it was.

    Dims: S = slots, B = batch, G = groups, C = columns, N = num_blocks, D = dim, L = state_len.

    Args:
      states: pytree of `MambaState`; None entries pass through. conv `[N, D, L]` (DS) or `[N, L, D]`
        (SD), temporal `[N, ...]`; any dtype. Array leaves are donated; `jax.Ref` leaves are updated in
        place.
      inputs: `PostprocessInputs` of int32 `[S]` each, S >= B; row i of the table is slot i.
      block_tables: int32 `[B, C]`, or `[G, B, C]` with one table per `MambaState.group`: block id of
        each column of `block_size` tokens.
      block_size: tokens per block, 1 <= block_size < 2**31. Static.
      conv_layout: "DS", "SD" or a `ConvStateLayout`. Static.
      idx_mapping: int32 `[B]`, batch row -> slot, negative to skip the row. Not implemented yet.
      num_reqs: integer scalar, traced or not: rows from this one on are padding. Default: all live.
      null_block_id: a block id never copied from or to; None for no such id. vLLM has no such rule
        and copies its null block: pass None to do the same. Static.
      implementation: None (the Mosaic GPU kernel where it can run, else XLA: see
        `select_implementation`), "mosaic_gpu" or "xla". Static.
      interpret: run the kernel in the Pallas GPU interpreter: True (with race detection) or
        `InterpretGPUParams`. Implies "mosaic_gpu". Static.
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
      NotImplementedError: the kernel was named and cannot run, with the reason; `idx_mapping`; `vmap`.

    The semantics are those of vLLM's `postprocess_mamba_fused_kernel` (vllm-project/vllm#45473).
    """
    conv_layout = ConvStateLayout.parse(conv_layout)
    assert_mamba_states(states, conv_layout=conv_layout)
    assert_block_tables(block_tables, states)
    batch = block_tables.shape[-2]
    if not isinstance(inputs, PostprocessInputs):
        raise ValueError(f"inputs must be a PostprocessInputs, got {type(inputs).__name__}")
    if (inputs.num_scheduled_tokens is None) != (inputs.num_draft_tokens is None):
        raise ValueError("inputs.num_scheduled_tokens and inputs.num_draft_tokens must both be given, or neither")
    assert_request_arrays(
        {f"inputs.{field.name}": getattr(inputs, field.name) for field in dataclasses.fields(inputs)}, min_slots=batch
    )
    if idx_mapping is not None:
        raise NotImplementedError("idx_mapping is not implemented yet: pass requests in batch order")
    pools, leaves, treedef = flatten_pools(states)
    statics = _check_statics(pools, block_size, conv_layout, null_block_id, implementation, interpret, config)
    _check_distinct(pools, leaves)
    is_ref = [isinstance(leaf, jax.Ref) for leaf in leaves]
    arrays, counter = _postprocess(
        [leaf for leaf, ref in zip(leaves, is_ref, strict=True) if not ref],
        [leaf for leaf, ref in zip(leaves, is_ref, strict=True) if ref],
        inputs,
        block_tables,
        _num_reqs_array(num_reqs, batch),
        pools=pools,
        is_ref=tuple(is_ref),
        statics=statics,
    )
    remaining = iter(arrays)
    leaves = [leaf if ref else next(remaining) for leaf, ref in zip(leaves, is_ref, strict=True)]
    return treedef.unflatten(leaves), counter


@functools.partial(jax.jit, static_argnames=("pools", "is_ref", "statics"), donate_argnames=("arrays",))
def _postprocess(
    arrays: list[jax.Array],
    refs: list[Any],
    inputs: PostprocessInputs,
    block_tables: jax.Array,
    num_reqs: jax.Array,
    *,
    pools: tuple[Pool, ...],
    is_ref: tuple[bool, ...],
    statics: _Statics,
) -> tuple[list[jax.Array], jax.Array]:
    inputs, block_tables, num_reqs = _refuse_vmap((inputs, block_tables, num_reqs))
    tables = block_tables if block_tables.ndim == 3 else block_tables[None]
    sources, ref_sources = iter(arrays), iter(refs)
    leaves = [next(ref_sources)[...] if ref else next(sources) for ref in is_ref]
    # Nothing can move in an empty pool, or without a table to name blocks.
    movable = [i for i, pool in enumerate(pools) if pool.size and tables.size]
    moved, counter = _move(
        [leaves[i] for i in movable], tuple(pools[i] for i in movable), inputs, tables, num_reqs, statics
    )
    for i, leaf in zip(movable, moved, strict=True):
        leaves[i] = leaf
    ref_targets = iter(refs)
    for leaf, ref in zip(leaves, is_ref, strict=True):
        if ref:
            next(ref_targets)[...] = leaf
    return [leaf for leaf, ref in zip(leaves, is_ref, strict=True) if not ref], counter


def _move(
    leaves: list[jax.Array],
    pools: tuple[Pool, ...],
    inputs: PostprocessInputs,
    tables: jax.Array,
    num_reqs: jax.Array,
    statics: _Statics,
) -> tuple[list[jax.Array], jax.Array]:
    """Plans and moves with the implementation that `statics` names; returns the leaves and the counter."""
    if statics.implementation == MOSAIC_GPU and pools:
        vectors, vectors_of = jax.tree.flatten(inputs)
        return state_copy_mgpu.move_states(
            leaves,
            pools,
            vectors,
            tables,
            num_reqs.reshape(1),
            decide=lambda vectors, live: decide_postprocess(
                vectors_of.unflatten(vectors), live, block_size=statics.block_size
            ),
            conv_layout=statics.conv_layout,
            null_block_id=statics.null_block_id,
            config=statics.config,
            num_ctas=statics.num_ctas,
            interpret=statics.interpret,
        )
    num_rows = inputs.num_accepted_tokens.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    live = (row < num_reqs) & (row < tables.shape[1])
    decision = decide_postprocess(inputs, live, block_size=statics.block_size)
    if not pools:
        return leaves, decision.num_accepted_tokens
    rows = jnp.arange(tables.shape[1])
    in_batch = jax.tree.map(lambda vector: vector[: tables.shape[1]], decision)
    ids = jax.vmap(
        lambda table: look_up_blocks(in_batch, lambda column: table[rows, column], tables.shape[2]),
        out_axes=BlockIds(0, 0, 0),
    )(tables)
    plan = CopyPlan(ids=ids, offset=in_batch.offset, live=in_batch.copies)
    moved = state_copy_xla.move_states(
        leaves, pools, plan, conv_layout=statics.conv_layout, null_block_id=statics.null_block_id
    )
    return moved, decision.num_accepted_tokens


def _check_statics(
    pools: tuple[Pool, ...],
    block_size: int,
    conv_layout: ConvStateLayout,
    null_block_id: int | None,
    implementation: str | None,
    interpret: bool | plgpu.InterpretGPUParams,
    config: KernelConfig | None,
) -> _Statics:
    """Normalises the static arguments, so that equal calls trace once."""
    if not _is_index(block_size) or not 1 <= operator.index(block_size) <= _INT32_MAX:
        raise ValueError(f"block_size must be an int with 1 <= block_size < 2**31, got {block_size!r}")
    if null_block_id is not None and not _is_index(null_block_id):
        raise ValueError(f"null_block_id must be an int or None, got {null_block_id!r}")
    if config is not None and not isinstance(config, KernelConfig):
        raise ValueError(f"config must be a KernelConfig or None, got {config!r}")
    if not isinstance(interpret, bool | plgpu.InterpretGPUParams):
        raise ValueError(f"interpret must be a bool or InterpretGPUParams, got {interpret!r}")
    if interpret is True:
        interpret = plgpu.InterpretGPUParams(detect_races=True)
    if interpret:
        if implementation == XLA:
            raise ValueError("interpret runs the kernel in an interpreter: it cannot go with implementation='xla'")
        implementation = implementation or MOSAIC_GPU
    config = config or KernelConfig()
    chosen = choose(pools, conv_layout, implementation, interpreted=bool(interpret)).name
    return _Statics(
        block_size=operator.index(block_size),
        conv_layout=conv_layout,
        null_block_id=_block_id_or_none(null_block_id),
        implementation=chosen,
        interpret=interpret or None,
        config=config,
        num_ctas=config.grid_size(target_device().num_sms, interpreted=bool(interpret)),
    )


def _block_id_or_none(null_block_id: int | None) -> int | None:
    """The id as an int; one that no int32 can equal is the same as none."""
    if null_block_id is None or not 0 <= operator.index(null_block_id) <= _INT32_MAX:
        return None
    return operator.index(null_block_id)


def _is_index(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool | jax.core.Tracer)


def _check_distinct(pools: tuple[Pool, ...], leaves: list[Any]) -> None:
    """Refuses a concrete array that is given twice: it could be donated only once."""
    seen: dict[int, str] = {}
    for pool, leaf in zip(pools, leaves, strict=True):
        if isinstance(leaf, jax.core.Tracer):
            continue
        if id(leaf) in seen:
            raise ValueError(f"{seen[id(leaf)]} and {pool.path} are the same array: every leaf of states is updated")
        seen[id(leaf)] = pool.path


def _num_reqs_array(num_reqs: jax.Array | int | None, batch: int) -> jax.Array:
    """The number of live rows as an int32 scalar; None counts the whole batch."""
    if num_reqs is None:
        return np.asarray(batch, np.int32)
    assert_integer_scalar(num_reqs, "num_reqs")
    if isinstance(num_reqs, int):
        return np.asarray(max(min(num_reqs, batch), 0), np.int32)
    if num_reqs.dtype.itemsize == 8:
        num_reqs = jnp.clip(num_reqs, 0, _INT32_MAX)
    return jnp.asarray(num_reqs, jnp.int32)


@jax.custom_batching.custom_vmap
def _refuse_vmap(operands: Any) -> Any:
    return operands


@_refuse_vmap.def_vmap
def _vmap_refused(axis_size: int, in_batched: Any, operands: Any) -> Any:
    raise NotImplementedError("vmap over a state copy is not supported: the batch is an axis of block_tables already")
