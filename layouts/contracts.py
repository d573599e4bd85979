"""chex contracts for what callers pass in. Each failure names the argument and the expected dims.

Dims: N = num_blocks, D = dim, L = state_len, S = slots, B = batch, G = groups, C = columns.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from layouts.conv_state import ConvStateLayout
from layouts.state import MambaState, is_mamba_state


def assert_mamba_states(states: Any, *, conv_layout: ConvStateLayout) -> None:
    """Asserts that `states` is a pytree of MambaStates with well-formed pools.

    Args:
      states: pytree of `MambaState`; None entries are allowed.
      conv_layout: names the axes in the messages. Static.

    Raises:
      AssertionError: a node is no MambaState, a leaf has the wrong rank, `group` is no count, or the
        leaves of one state disagree on `num_blocks` (or `num_layers`).
    """
    nodes, _ = jax.tree_util.tree_flatten_with_path(states, is_leaf=is_mamba_state)
    for path, state in nodes:
        name = "states" + jax.tree_util.keystr(path)
        _require(isinstance(state, MambaState), f"{name} must be a MambaState or None, got {type(state).__name__}")
        _require(
            isinstance(state.group, int) and not isinstance(state.group, bool) and state.group >= 0,
            f"{name}.group must be an int >= 0, got {state.group!r}",
        )
        _assert_mamba_state(name, state, conv_layout)


def _assert_mamba_state(name: str, state: MambaState, conv_layout: ConvStateLayout) -> None:
    lead = ("num_layers", "num_blocks") if state.stacked else ("num_blocks",)
    conv_dims = f"[{', '.join(lead[:-1] + conv_layout.axes)}] ({conv_layout.name} layout)"
    temporal_dims = f"[{', '.join(lead)}, ...]"
    leaves = [
        (name + jax.tree_util.keystr(path), path[0].name, leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    ]
    for leaf_name, kind, leaf in leaves:
        dims = conv_dims if kind == "conv" else temporal_dims
        _require(
            hasattr(leaf, "shape") and hasattr(leaf, "dtype"),
            f"{leaf_name} must be an array {dims}, got {type(leaf).__name__}",
        )
        _require(
            _is_jax_dtype(leaf.dtype),
            f"{leaf_name} must have a dtype that JAX holds (8-byte types need jax_enable_x64), got {leaf.dtype}",
        )
        ranks = len(lead) + 2 if kind == "conv" else set(range(len(lead), len(leaf.shape) + len(lead) + 1))
        chex.assert_rank(leaf, ranks, custom_message=f"{leaf_name} must be {dims}")
    for leaf_name, _, leaf in leaves:
        first_name, _, first = leaves[0]
        chex.assert_equal(
            tuple(leaf.shape[: len(lead)]),
            tuple(first.shape[: len(lead)]),
            custom_message=f"{leaf_name} and {first_name} must have the same {' and '.join(lead)}",
        )


def assert_block_tables(block_tables: Any, states: Any) -> None:
    """Asserts the shape and type of `block_tables`, and that every state's group has a table.

    Args:
      block_tables: int32 `[B, C]`, or `[G, B, C]`.
      states: pytree of `MambaState` that has passed `assert_mamba_states`.

    Raises:
      AssertionError: wrong rank or type, or a `group` without a table.
    """
    dims = "block_tables must be int32 [batch, columns] or [groups, batch, columns]"
    _require_array(block_tables, dims)
    chex.assert_rank(block_tables, {2, 3}, custom_message=dims)
    chex.assert_type(block_tables, jnp.int32, custom_message=dims)
    num_tables = 1 if len(block_tables.shape) == 2 else block_tables.shape[0]
    _assert_groups(states, num_tables, "block_tables", tuple(block_tables.shape))


def _assert_groups(states: Any, num_groups: int, name: str, shape: tuple[int, ...]) -> None:
    nodes, _ = jax.tree_util.tree_flatten_with_path(states, is_leaf=is_mamba_state)
    for path, state in nodes:
        _require(
            state.group < num_groups,
            f"states{jax.tree_util.keystr(path)}.group is {state.group}, but {name} of shape {shape} holds "
            f"{num_groups} group(s)",
        )


def assert_request_arrays(arrays: dict[str, Any], *, min_slots: int) -> None:
    """Asserts that all arrays are int32 `[slots]` with one and the same, sufficient length.

    Args:
      arrays: name -> array.
      min_slots: the batch size, when every batch row is a slot of its own; 0 otherwise. Static.

    Raises:
      AssertionError: an array has another rank, type or length.
    """
    first_name = next(iter(arrays))
    for name, array in arrays.items():
        dims = f"{name} must be int32 [slots]"
        _require_array(array, dims)
        chex.assert_rank(array, 1, custom_message=dims)
        chex.assert_type(array, jnp.int32, custom_message=dims)
        chex.assert_equal_shape(
            [arrays[first_name], array], custom_message=f"{name} must have the length of {first_name}"
        )
    _require(
        arrays[first_name].shape[0] >= min_slots,
        f"{first_name} must be int32 [slots] with slots >= batch = {min_slots} (the rows of block_tables), got "
        f"{arrays[first_name].shape[0]} slots",
    )


def assert_int32_vector(array: Any, name: str, length: tuple[str, int]) -> None:
    """Asserts that `array` is int32 `[length]`.

    Args:
      array: the argument.
      name: how the caller knows it.
      length: the length's name and value. Static.

    Raises:
      AssertionError: wrong rank, type or length.
    """
    dims = f"{name} must be int32 [{length[0]}]"
    _require_array(array, dims)
    chex.assert_shape(array, (length[1],), custom_message=dims)
    chex.assert_type(array, jnp.int32, custom_message=dims)


def assert_block_ids(array: Any, name: str, states: Any, *, like: Any = None) -> None:
    """Asserts that `array` holds block ids for every state's group.

    Args:
      array: int32 `[num_rows]` or `[groups, num_rows]`.
      name: how the caller knows it.
      states: pytree of `MambaState` that has passed `assert_mamba_states`.
      like: an array whose shape it must have.

    Raises:
      AssertionError: wrong rank, type or shape, or a `group` without ids.
    """
    dims = f"{name} must be int32 [num_rows] or [groups, num_rows]"
    _require_array(array, dims)
    chex.assert_rank(array, {1, 2}, custom_message=dims)
    chex.assert_type(array, jnp.int32, custom_message=dims)
    if like is not None:
        chex.assert_equal_shape([like, array], custom_message=f"{name} must have the shape of src_blocks")
    _assert_groups(states, 1 if len(array.shape) == 1 else array.shape[0], name, tuple(array.shape))


def assert_integer_scalar(value: Any, name: str) -> None:
    """Asserts that `value` is a scalar of an integer type: a Python int, or an array of rank 0.

    Raises:
      AssertionError: it is not.
    """
    dtype = jnp.result_type(value) if isinstance(value, int) or hasattr(value, "dtype") else None
    is_integer = dtype is not None and jnp.issubdtype(dtype, jnp.integer)
    _require(is_integer and jnp.ndim(value) == 0, f"{name} must be an integer scalar, got {value!r}")


def _is_jax_dtype(dtype: Any) -> bool:
    """Whether an array of this type stays as it is when it becomes a JAX array."""
    try:
        dtype = np.dtype(dtype)
    except TypeError:  # A JAX key, say.
        return False
    return dtype.isnative and dtype.kind in "biufcV" and jax.dtypes.canonicalize_dtype(dtype) == dtype


def _require_array(value: Any, dims: str) -> None:
    """Index arrays are values: a Ref cannot be one, nor a list."""
    is_array = hasattr(value, "shape") and not isinstance(value, jax.Ref)
    _require(is_array, f"{dims}, got {type(value).__name__}")


def _require(condition: bool, message: str) -> None:
    """A contract that no chex assertion words as well as its own sentence does."""
    chex.assert_equal(bool(condition), True, custom_message=message)
