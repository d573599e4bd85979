"""From checked arguments to a mover: statics, donation and the jit boundary."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from layouts import ConvStateLayout, assert_integer_scalar
from pallas_kernels import state_copy_mgpu, state_copy_xla
from pallas_kernels.config import KernelConfig
from pallas_kernels.plan import Operation, Request, View, decide_step, plan_copies
from pallas_kernels.pools import Pool, StateKind, flatten_pools
from pallas_kernels.selection import MOSAIC_GPU, XLA, choose, target_device

INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run an operation, normalised so that equal calls trace once.

    Attributes:
      conv_layout: layout of the conv pools.
      null_block_id: id that is never copied from or to.
      implementation: what was asked for.
      interpret: parameters of the interpreter, or None.
      config: tuning knobs.
    """

    conv_layout: ConvStateLayout
    null_block_id: int | None
    implementation: str | None
    interpret: plgpu.InterpretGPUParams | None
    config: KernelConfig


def make_options(
    conv_layout: ConvStateLayout | str,
    null_block_id: int | None,
    implementation: str | None,
    interpret: bool | plgpu.InterpretGPUParams,
    config: KernelConfig | None,
) -> Options:
    """Checks and normalises the options that all operations share.

    Raises:
      ValueError: one of them is out of range, or `interpret` comes with "xla".
    """
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
    return Options(
        conv_layout=ConvStateLayout.parse(conv_layout),
        null_block_id=check_block_id(null_block_id),
        implementation=implementation,
        interpret=interpret or None,
        config=config or KernelConfig(),
    )


def check_block_id(null_block_id: int | None) -> int | None:
    """Returns the id as an int. One that no int32 can equal is the same as none.

    Raises:
      ValueError: it is neither an int nor None.
    """
    if null_block_id is None:
        return None
    if not is_static_int(null_block_id):
        raise ValueError(f"null_block_id must be an int or None, got {null_block_id!r}")
    return int(null_block_id) if 0 <= null_block_id <= INT32_MAX else None


def check_block_size(block_size: int) -> int:
    """Returns the block size as an int.

    Raises:
      ValueError: it is out of range.
    """
    if not is_static_int(block_size) or not 1 <= block_size <= INT32_MAX:
        raise ValueError(f"block_size must be an int with 1 <= block_size < 2**31, got {block_size!r}")
    return int(block_size)


def is_static_int(value: Any) -> bool:
    """Whether `value` is an integer that is known when tracing."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def int32_count(count: jax.Array | int | None, most: int, name: str) -> Any:
    """A number of rows as an int32 scalar, at most `most` and not negative where its type could not say so.

    Raises:
      AssertionError (contract): `count` is no integer scalar.
    """
    if count is None:
        return None
    assert_integer_scalar(count, name)
    if not isinstance(count, jax.Array):
        return np.asarray(min(max(int(count), 0), most), np.int32)
    if count.dtype.itemsize < 4 or count.dtype == jnp.int32:
        return count.astype(jnp.int32)
    return jnp.clip(count, 0, most).astype(jnp.int32)


def run(
    states: Any,
    operation: Operation,
    request: Request,
    views: Sequence[View],
    options: Options,
    *,
    num_rows: int,
) -> tuple[Any, tuple[jax.Array, ...]]:
    """Runs one operation on checked arguments.

    Args:
      states: pytree of `MambaState`. Array leaves are donated, `jax.Ref` leaves updated in place.
      operation: what to do. Static.
      request: the index arrays.
      views: the row vectors in `request.row_arrays`. Static.
      options: how to run it. Static.
      num_rows: rows of the batch. Static.

    Returns:
      The states, with the same Refs, and the slot vectors that the operation updates.
    """
    pools, leaves, treedef = flatten_pools(states)
    _check_bounds(pools, request, views, num_rows)
    _check_distinct(pools, leaves)
    _check_unsharded(pools, leaves)
    interpreted = options.interpret is not None
    device = target_device()
    chosen = choose(pools, options.conv_layout, options.implementation, device, interpreted=interpreted)
    if chosen.name == MOSAIC_GPU:
        _check_not_varying(pools, leaves)
        config = options.config.resolved(device.num_sms, interpreted=interpreted)
    else:
        config = KernelConfig()  # XLA has no knobs, so it does not trace again for others.
    is_ref = tuple(isinstance(leaf, jax.Ref) for leaf in leaves)
    arrays, updated = _run(
        [leaf for leaf, ref in zip(leaves, is_ref, strict=True) if not ref],
        [leaf for leaf, ref in zip(leaves, is_ref, strict=True) if ref],
        request,
        pools=pools,
        is_ref=is_ref,
        operation=operation,
        views=tuple(views),
        options=dataclasses.replace(options, implementation=chosen.name, config=config),
        num_rows=num_rows,
    )
    remaining = iter(arrays)
    return treedef.unflatten(
        leaf if ref else next(remaining) for leaf, ref in zip(leaves, is_ref, strict=True)
    ), updated


def _check_bounds(pools: Sequence[Pool], request: Request, views: Sequence[View], num_rows: int) -> None:
    """Refuses what would send a mover out of range. Unlike chex, this cannot be disabled."""
    slots = {vector.shape for vector in request.slot_vectors}
    num_groups = request.block_tables.shape[0] if request.block_tables is not None else None
    sound = (
        all(array.dtype == jnp.int32 for array in jax.tree.leaves(request))
        and all(len(shape) == 1 for shape in slots)
        and len(slots) <= 1
        and (request.block_tables is None or len(request.block_tables.shape) == 3)
        and (request.idx_mapping is None or request.idx_mapping.shape == (num_rows,))
        and (request.idx_mapping is not None or all(shape[0] >= num_rows for shape in slots))
        and (request.num_reqs is None or request.num_reqs.shape == ())
        and all(len(array.shape) == 1 for array in request.row_arrays)
        and all(0 <= view.start <= request.row_arrays[view.array].size - view.length for view in views)
        and all(isinstance(pool.table, int) and pool.table >= 0 for pool in pools)
        and (num_groups is None or all(pool.table < num_groups for pool in pools))
        and all(len(pool.block_shape) == 2 for pool in pools if pool.kind is StateKind.CONV)
    )
    if not sound:
        raise ValueError("the index arrays do not fit each other or the states; enable chex's assertions to see which")


def _check_distinct(pools: Sequence[Pool], leaves: Sequence[Any]) -> None:
    """Refuses a concrete array that is given twice: it could be donated only once."""
    seen: dict[int, str] = {}
    for pool, leaf in zip(pools, leaves, strict=True):
        if isinstance(leaf, jax.core.Tracer):
            continue
        if id(leaf) in seen:
            raise ValueError(f"{seen[id(leaf)]} and {pool.path} are the same array: every leaf of states is updated")
        seen[id(leaf)] = pool.path


def _check_unsharded(pools: Sequence[Pool], leaves: Sequence[Any]) -> None:
    """Refuses a pool that is seen to be spread over devices: block ids name blocks of one device's pool.

    Under Auto axes a tracer does not tell, and XLA would copy globally, with communication.
    """
    for pool, leaf in zip(pools, leaves, strict=True):
        if isinstance(leaf, jax.core.Tracer):
            sharding = getattr(jax.typeof(leaf), "sharding", None)
            spread = sharding is not None and any(axis is not None for axis in sharding.spec)
        else:
            sharding = getattr(leaf, "sharding", None)
            spread = sharding is not None and len(sharding.device_set) > 1 and not sharding.is_fully_replicated
        if spread:
            raise ValueError(
                f"{pool.path} is sharded as {sharding.spec}: run the operation under jax.shard_map, "
                "as pallas_kernels.shard_operation does"
            )


def _check_not_varying(pools: Sequence[Pool], leaves: Sequence[Any]) -> None:
    """Refuses the kernel under a `jax.shard_map` that checks varying axes, which Pallas refs do not carry."""
    for pool, leaf in zip(pools, leaves, strict=True):
        manual = getattr(jax.typeof(leaf), "manual_axis_type", None)
        if manual is not None and manual.varying:
            raise NotImplementedError(
                f"{pool.path} varies over {sorted(manual.varying)}: the kernel needs "
                "jax.shard_map(..., check_vma=False), as pallas_kernels.shard_operation sets it"
            )


@functools.partial(
    jax.jit,
    static_argnames=("pools", "is_ref", "operation", "views", "options", "num_rows"),
    donate_argnames=("arrays",),
)
def _run(
    arrays: list[jax.Array],
    refs: list[Any],
    request: Request,
    *,
    pools: tuple[Pool, ...],
    is_ref: tuple[bool, ...],
    operation: Operation,
    views: tuple[View, ...],
    options: Options,
    num_rows: int,
) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
    request, arrays = _refuse_vmap((request, arrays))
    from_arrays, from_refs = iter(arrays), iter(refs)
    leaves = [next(from_refs)[...] if ref else next(from_arrays) for ref in is_ref]
    # Nothing can move in an empty pool, without a table to name its blocks, or for rows without slots.
    slots_or_rows = request.slot_vectors[0].size if request.slot_vectors else num_rows
    has_ids = slots_or_rows and (request.block_tables is None or request.block_tables.size)
    movable = [i for i, pool in enumerate(pools) if pool.size and has_ids]
    operands = [leaves[i] for i in movable], [pools[i] for i in movable]
    shared = {"conv_layout": options.conv_layout, "null_block_id": options.null_block_id}
    if not slots_or_rows:
        updated = tuple(request.slot_vectors[index] for index in operation.updated)
    elif movable and options.implementation == MOSAIC_GPU:
        moved, updated = state_copy_mgpu.move_states(
            *operands,
            operation,
            request,
            views,
            num_rows=num_rows,
            config=options.config,
            interpret=options.interpret,
            **shared,
        )
    else:
        values, decision, updated = decide_step(operation, request, views, num_rows=num_rows)
        if movable:
            plan = plan_copies(operation, request, values, decision)
            moved = state_copy_xla.move_states(*operands, plan, **shared)
    for i, leaf in zip(movable, moved if movable else (), strict=True):
        leaves[i] = leaf
    to_refs = iter(refs)
    for leaf, ref in zip(leaves, is_ref, strict=True):
        if ref:
            next(to_refs)[...] = leaf
    return [leaf for leaf, ref in zip(leaves, is_ref, strict=True) if not ref], updated


@jax.custom_batching.custom_vmap
def _refuse_vmap(operands: Any) -> Any:
    return operands


@_refuse_vmap.def_vmap
def _vmap_refused(axis_size: int, in_batched: Any, operands: Any) -> Any:
    raise NotImplementedError("vmap over a state copy is not supported: the index arrays have a batch axis already")
