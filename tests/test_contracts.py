"""What callers are told when they break a contract: the message names the argument and what was expected."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts import ConvStateLayout, MambaState
from pallas_kernels import (
    KernelConfig,
    PostprocessInputs,
    PreprocessInputs,
    aligned_state_indices,
    copy_mamba_blocks,
    postprocess_mamba,
    preprocess_mamba,
    select_implementation,
)

_STATE = MambaState(conv=jnp.zeros((8, 4, 5), jnp.bfloat16), temporal=jnp.zeros((8, 2, 4)))


def _inputs(slots: int = 3, **changes: Any) -> PostprocessInputs:
    names = [field.name for field in dataclasses.fields(PostprocessInputs)]
    return PostprocessInputs(**{name: jnp.ones(slots, jnp.int32) for name in names} | changes)


def _call(states: Any = (_STATE,), inputs: Any = None, tables: Any = None, **options: Any) -> Any:
    copy = jax.tree.map(lambda leaf: jnp.array(leaf) if isinstance(leaf, jax.Array) else leaf, states)
    options = {"block_size": 4, "conv_layout": "DS"} | options
    try:
        return postprocess_mamba(
            copy,
            _inputs() if inputs is None else inputs,
            jnp.zeros((3, 2), jnp.int32) if tables is None else tables,
            **options,
        )
    except Exception:
        _assert_untouched(copy, states)
        raise


def _assert_untouched(states: Any, before: Any) -> None:
    """Whatever a call refuses, it has neither donated nor written."""
    for leaf, old in zip(jax.tree.leaves(states), jax.tree.leaves(before), strict=True):
        if isinstance(old, jax.Array):
            assert not leaf.is_deleted()
            np.testing.assert_array_equal(leaf, old)


_CONV_4D = dataclasses.replace(_STATE, conv=jnp.zeros((8, 4, 5, 1)))
_CONTRACTS = {
    "conv_of_rank_4": (
        {"states": [_CONV_4D]},
        "states[0].conv must be [num_blocks, dim, state_len] (DS layout)",
    ),
    "conv_of_rank_4_sd": (
        {"states": [_CONV_4D], "conv_layout": "SD"},
        "states[0].conv must be [num_blocks, state_len, dim] (SD layout)",
    ),
    "conv_of_rank_2": (
        {"states": {"layer": MambaState(conv=jnp.zeros((8, 4)))}},
        "states['layer'].conv must be [num_blocks, dim, state_len] (DS layout)",
    ),
    "stacked_conv_of_rank_3": (
        {"states": [dataclasses.replace(_STATE, stacked=True)]},
        "states[0].conv must be [num_layers, num_blocks, dim, state_len] (DS layout)",
    ),
    "temporal_without_blocks": (
        {"states": [MambaState(temporal=jnp.float32(0))]},
        "states[0].temporal must be [num_blocks, ...]",
    ),
    "stacked_temporal_of_rank_1": (
        {"states": [MambaState(temporal=jnp.zeros(3), stacked=True)]},
        "states[0].temporal must be [num_layers, num_blocks, ...]",
    ),
    "num_blocks_differ": (
        {"states": [dataclasses.replace(_STATE, temporal=jnp.zeros((9, 2, 4)))]},
        "states[0].temporal and states[0].conv must have the same num_blocks",
    ),
    "num_layers_differ": (
        {"states": [MambaState(conv=jnp.zeros((2, 8, 4, 5)), temporal=jnp.zeros((3, 8, 4)), stacked=True)]},
        "states[0].temporal and states[0].conv must have the same num_layers and num_blocks",
    ),
    "num_blocks_differ_in_a_tuple": (
        {"states": [MambaState(conv=(jnp.zeros((8, 4, 5)), jnp.zeros((7, 4, 5))))]},
        "states[0].conv[1] and states[0].conv[0] must have the same num_blocks",
    ),
    "a_plain_array_in_states": (
        {"states": [_STATE, jnp.zeros((8, 4, 5))]},
        "states[1] must be a MambaState or None, got",
    ),
    "a_list_as_conv": (
        {"states": [MambaState(conv=["pool"])]},
        "states[0].conv[0] must be an array [num_blocks, dim, state_len] (DS layout), got str",
    ),
    "boolean_group": ({"states": [dataclasses.replace(_STATE, group=True)]}, "states[0].group must be an int >= 0"),
    "eight_byte_leaf_without_x64": (
        {"states": [MambaState(temporal=np.zeros((6, 4)))]},
        "states[0].temporal must have a dtype that JAX holds (8-byte types need jax_enable_x64), got float64",
    ),
    "leaf_of_objects": (
        {"states": [MambaState(temporal=np.zeros((6, 4), object))]},
        "states[0].temporal must have a dtype that JAX holds",
    ),
    "input_left_out": (
        {"inputs": _inputs(num_computed_tokens=None)},
        "inputs.num_computed_tokens must be int32 [slots], got NoneType",
    ),
    "mapping_of_another_length": (
        {"idx_mapping": jnp.zeros(2, jnp.int32)},
        "idx_mapping must be int32 [batch]",
    ),
    "mapping_of_int8": ({"idx_mapping": jnp.zeros(3, jnp.int8)}, "idx_mapping must be int32 [batch]"),
    "negative_group": ({"states": [dataclasses.replace(_STATE, group=-1)]}, "states[0].group must be an int >= 0"),
    "group_without_a_table": (
        {"states": [dataclasses.replace(_STATE, group=1)]},
        "states[0].group is 1, but block_tables of shape (3, 2) holds 1 group(s)",
    ),
    "group_beyond_the_tables": (
        {"states": [dataclasses.replace(_STATE, group=2)], "tables": jnp.zeros((2, 3, 2), jnp.int32)},
        "states[0].group is 2, but block_tables of shape (2, 3, 2) holds 2 group(s)",
    ),
    "block_tables_of_rank_1": (
        {"tables": jnp.zeros(3, jnp.int32)},
        "block_tables must be int32 [batch, columns] or [groups, batch, columns]",
    ),
    "block_tables_of_floats": (
        {"tables": jnp.zeros((3, 2))},
        "block_tables must be int32 [batch, columns] or [groups, batch, columns]",
    ),
    "block_tables_as_a_list": (
        {"tables": [[0, 1]]},
        "block_tables must be int32 [batch, columns] or [groups, batch, columns], got list",
    ),
    "short_input": (
        {"inputs": _inputs(num_draft_tokens=jnp.ones(2, jnp.int32))},
        "inputs.num_draft_tokens must have the length of inputs.mamba_state_idx",
    ),
    "fewer_slots_than_rows": (
        {"inputs": _inputs(2)},
        "inputs.mamba_state_idx must be int32 [slots] with slots >= batch = 3 (the rows of block_tables), got 2 slots",
    ),
    "input_of_rank_2": (
        {"inputs": _inputs(num_computed_tokens=jnp.ones((3, 1), jnp.int32))},
        "inputs.num_computed_tokens must be int32 [slots]",
    ),
    "input_of_floats": (
        {"inputs": _inputs(num_accepted_tokens=jnp.ones(3))},
        "inputs.num_accepted_tokens must be int32 [slots]",
    ),
    "input_of_int16": (
        {"inputs": _inputs(mamba_state_idx=jnp.ones(3, jnp.int16))},
        "inputs.mamba_state_idx must be int32 [slots]",
    ),
    "num_reqs_of_floats": ({"num_reqs": 2.0}, "num_reqs must be an integer scalar, got 2.0"),
    "num_reqs_as_a_vector": ({"num_reqs": jnp.ones(2, jnp.int32)}, "num_reqs must be an integer scalar"),
    "num_reqs_as_a_vector_of_one": ({"num_reqs": jnp.ones(1, jnp.int32)}, "num_reqs must be an integer scalar"),
}
_VALUES = {
    "conv_layout": ({"conv_layout": "NHD"}, "conv_layout must be 'DS' or 'SD', got 'NHD'"),
    "block_size_0": ({"block_size": 0}, "block_size must be an int with 1 <= block_size < 2**31, got 0"),
    "block_size_2_31": ({"block_size": 2**31}, "block_size must be an int with 1 <= block_size < 2**31"),
    "block_size_of_float": ({"block_size": 16.0}, "block_size must be an int with 1 <= block_size < 2**31, got 16.0"),
    "null_block_id": ({"null_block_id": "zero"}, "null_block_id must be an int or None, got 'zero'"),
    "implementation": (
        {"implementation": "triton"},
        "implementation must be None or one of ('mosaic_gpu', 'xla'), got 'triton'",
    ),
    "interpret_with_xla": (
        {"implementation": "xla", "interpret": True},
        "interpret runs the kernel in an interpreter: it cannot go with implementation='xla'",
    ),
    "interpret": ({"interpret": "yes"}, "interpret must be a bool or InterpretGPUParams, got 'yes'"),
    "config": ({"config": 8}, "config must be a KernelConfig or None, got 8"),
    "null_block_id_as_an_array": ({"null_block_id": jnp.int32(0)}, "null_block_id must be an int or None"),
    "block_size_as_an_array": ({"block_size": jnp.int32(4)}, "block_size must be an int with 1 <= block_size < 2**31"),
    "inputs": ({"inputs": {}}, "inputs must be a PostprocessInputs, got dict"),
    "one_count_without_the_other": (
        {"inputs": _inputs(num_draft_tokens=None)},
        "inputs.num_scheduled_tokens and inputs.num_draft_tokens must both be given, or neither",
    ),
}
_UNSUPPORTED = {
    "bool_pool": (
        {"states": [MambaState(temporal=jnp.zeros((8, 16), bool))], "implementation": "mosaic_gpu"},
        "states[0].temporal has dtype bool",
    ),
    "complex_pool": (
        {"states": [MambaState(temporal=jnp.zeros((8, 16), jnp.complex64))], "implementation": "mosaic_gpu"},
        "states[0].temporal has dtype complex64",
    ),
    "sub_byte_pool": (
        {"states": [MambaState(temporal=jnp.zeros((8, 32), jnp.int4))], "implementation": "mosaic_gpu"},
        "states[0].temporal has dtype int4",
    ),
    "block_of_24_bytes": (
        {"states": [None, MambaState(conv=jnp.zeros((8, 4, 3), jnp.bfloat16))], "implementation": "mosaic_gpu"},
        "states[1].conv has blocks of 24 bytes",
    ),
    "endless_window": (
        {"states": [MambaState(conv=jnp.zeros((2, 1, 2**16)))], "implementation": "mosaic_gpu"},
        "states[0].conv has a state_len of 65536, too long for a stage in shared memory",
    ),
}


@pytest.mark.parametrize(("options", "message"), _CONTRACTS.values(), ids=_CONTRACTS)
def test_broken_contract_names_argument_and_dims(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        _call(**options)


@pytest.mark.parametrize(("options", "message"), _VALUES.values(), ids=_VALUES)
def test_bad_value_names_argument_and_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _call(**options)


@pytest.mark.parametrize(("options", "message"), _UNSUPPORTED.values(), ids=_UNSUPPORTED)
def test_named_kernel_says_what_it_cannot_take(options: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        _call(**options)


@pytest.mark.parametrize(("options", "message"), _UNSUPPORTED.values(), ids=_UNSUPPORTED)
def test_what_the_kernel_cannot_take_goes_to_xla(options: dict[str, Any], message: str) -> None:
    h200 = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=h200)):
        selection = select_implementation(options["states"], conv_layout="DS")
    assert selection.name == "xla"
    assert message in selection.reason


def _pre(**changes: Any) -> Any:
    vectors = {
        name: jnp.ones(3, jnp.int32) for name in ("mamba_state_idx", "num_accepted_tokens", "num_computed_tokens")
    }
    vectors |= {"query_start_loc": jnp.arange(4, dtype=jnp.int32)}
    options = {name: changes.pop(name) for name in ("preserve_accepted", "implementation") if name in changes}
    inputs = changes.pop("inputs", None) or PreprocessInputs(**vectors | changes)
    states = jax.tree.map(jnp.array, [_STATE])
    return preprocess_mamba(states, inputs, jnp.zeros((3, 2), jnp.int32), block_size=4, conv_layout="DS", **options)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"query_start_loc": jnp.arange(3, dtype=jnp.int32)},
            AssertionError,
            "inputs.query_start_loc must be int32 [batch + 1]",
        ),
        ({"query_start_loc": jnp.arange(4.0)}, AssertionError, "inputs.query_start_loc must be int32 [batch + 1]"),
        (
            {"num_accepted_tokens": jnp.ones(2, jnp.int32)},
            AssertionError,
            "inputs.num_accepted_tokens must have the length of",
        ),
        ({"inputs": _inputs()}, ValueError, "inputs must be a PreprocessInputs, got PostprocessInputs"),
        ({"preserve_accepted": "no"}, ValueError, "preserve_accepted must be a bool, got 'no'"),
    ],
)
def test_preprocess_names_what_is_wrong(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        _pre(**changes)


def _ids(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((_ids(3), _ids(4)), {}, "dst_blocks must have the shape of src_blocks"),
        ((_ids(3), None), {}, "dst_blocks must be int32 [num_rows] or [groups, num_rows], got NoneType"),
        ((_ids(3, 2, 1), _ids(3)), {}, "src_blocks must be int32 [num_rows] or [groups, num_rows]"),
        ((jnp.zeros(3), _ids(3)), {}, "src_blocks must be int32 [num_rows] or [groups, num_rows]"),
        ((_ids(3), _ids(3), _ids(2)), {}, "token_offsets must be int32 [num_rows]"),
        ((_ids(2, 3), _ids(2, 3), _ids(3), _ids(3)), {}, "temporal_src_blocks must have the shape of src_blocks"),
        ((_ids(0, 3), _ids(0, 3)), {}, "states[0].group is 0, but src_blocks of shape (0, 3) holds 0 group(s)"),
        ((_ids(3), _ids(3)), {"num_copies": 1.0}, "num_copies must be an integer scalar, got 1.0"),
    ],
)
def test_copy_names_what_is_wrong(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        copy_mamba_blocks([_STATE], *arguments, conv_layout="DS", **options)


def test_copy_of_no_states_returns_them() -> None:
    assert copy_mamba_blocks([], _ids(0, 3), _ids(0, 3), conv_layout="DS") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_state_slots": 0}, "num_state_slots must be a positive int32, got 0"),
        ({"null_block_id": 2**40}, "null_block_id must be an int32 or None"),
        ({"block_size": 0}, "block_size must be an int with 1 <= block_size"),
    ],
)
def test_aligned_indices_name_what_is_wrong(options: dict[str, Any], message: str) -> None:
    options = {"block_size": 4, "num_state_slots": 2} | options
    with pytest.raises(ValueError, match=re.escape(message)):
        aligned_state_indices(_ids(3, 2), _ids(3), **options)


@pytest.mark.parametrize(
    ("num_reqs", "live"),
    [
        (2, 2), (-5, 0), (2**70, 3), (np.int64(2**40), 3), (np.int64(-(2**40) + 1), 0), (np.uint64(2**63), 3),
        (np.uint32(2**32 - 1), 3), (np.uint8(2), 2), (jnp.uint32(2**31 + 5), 3), (jnp.uint8(2), 2), (jnp.int16(-1), 0),
    ],
)  # fmt: skip
def test_num_reqs_of_any_integer_type_counts_right(num_reqs: Any, live: int) -> None:
    # Every row reaches the boundary at 4 in its own column 0.
    inputs = _inputs(
        mamba_state_idx=jnp.zeros(3, jnp.int32),
        num_accepted_tokens=jnp.full(3, 2, jnp.int32),
        num_computed_tokens=jnp.full(3, 2, jnp.int32),
        num_scheduled_tokens=jnp.full(3, 2, jnp.int32),
    )
    _, counter = _call([], inputs, num_reqs=num_reqs)
    assert counter.tolist() == [1] * live + [2] * (3 - live)


def test_no_slots_are_no_requests() -> None:
    none = jnp.zeros(0, jnp.int32)
    inputs = _inputs(**{field.name: none for field in dataclasses.fields(PostprocessInputs)})
    (state,), counter = _call(inputs=inputs, idx_mapping=jnp.arange(3, dtype=jnp.int32))
    assert counter.shape == (0,)
    np.testing.assert_array_equal(state.conv, _STATE.conv)


_VECTORS = [field.name for field in dataclasses.fields(PostprocessInputs)]


def _copy(*arguments: Any, **options: Any) -> Any:
    return copy_mamba_blocks([jax.tree.map(jnp.array, _STATE)], *arguments, conv_layout="DS", **options)


# What the contracts refuse, as a call without them gets it: with the name of an implementation.
_MISFITS = {
    "short_vector": lambda **name: _call(
        inputs=_inputs(num_accepted_tokens=jnp.ones(7, jnp.int32)), idx_mapping=_ids(3), **name
    ),
    "vectors_of_rank_2": lambda **name: _call(inputs=_inputs(**{field: _ids(3, 1) for field in _VECTORS}), **name),
    "vector_of_int16": lambda **name: _call(inputs=_inputs(num_accepted_tokens=jnp.ones(3, jnp.int16)), **name),
    "vector_of_floats": lambda **name: _call(inputs=_inputs(num_accepted_tokens=jnp.ones(3)), **name),
    "few_slots": lambda **name: _call(inputs=_inputs(2), **name),
    "short_mapping": lambda **name: _call(idx_mapping=_ids(2), **name),
    "mapping_of_int8": lambda **name: _call(idx_mapping=jnp.zeros(3, jnp.int8), **name),
    "mapping_of_floats": lambda **name: _call(idx_mapping=jnp.zeros(3), **name),
    "table_of_int16": lambda **name: _call(tables=jnp.zeros((3, 2), jnp.int16), **name),
    "table_of_uint32": lambda **name: _call(tables=jnp.zeros((3, 2), jnp.uint32), **name),
    "table_of_rank_4": lambda **name: _call(tables=_ids(1, 1, 3, 2), **name),
    "group_without_a_table": lambda **name: _call([dataclasses.replace(_STATE, group=1)], **name),
    "negative_group": lambda **name: _call([dataclasses.replace(_STATE, group=-1)], **name),
    "group_of_float": lambda **name: _call([dataclasses.replace(_STATE, group=0.5)], **name),
    "conv_of_rank_4": lambda **name: _call([MambaState(conv=jnp.zeros((8, 4, 5, 4)))], **name),
    "conv_of_rank_2": lambda **name: _call([MambaState(conv=jnp.zeros((8, 16)))], **name),
    "num_reqs_as_a_vector": lambda **name: _call(num_reqs=_ids(3), **name),
    "short_query_start_loc": lambda **name: _pre(query_start_loc=_ids(3), **name),
    "query_start_loc_of_floats": lambda **name: _pre(query_start_loc=jnp.zeros(4), **name),
    "query_start_loc_of_rank_2": lambda **name: _pre(query_start_loc=_ids(2, 2), **name),
    "short_dst_blocks": lambda **name: _copy(_ids(3), _ids(2), **name),
    "short_temporal_src_blocks": lambda **name: _copy(_ids(3), _ids(3), None, _ids(2), **name),
    "short_token_offsets": lambda **name: _copy(_ids(3), _ids(3), _ids(2), **name),
    "block_ids_of_floats": lambda **name: _copy(jnp.zeros(3), _ids(3), **name),
}


@pytest.mark.parametrize("call", _MISFITS.values(), ids=_MISFITS)
@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_disabled_assertions_open_no_way_out_of_range(call: Callable[..., Any], implementation: str) -> None:
    chex.disable_asserts()
    try:
        with pytest.raises(ValueError, match="the index arrays do not fit each other or the states"):
            call(implementation=implementation)
    finally:
        chex.enable_asserts()


@pytest.mark.parametrize("options", [{"tables": _ids(3)}, {"block_size": 0}, {"implementation": "mosaic_gpu"}])
def test_refused_call_writes_nothing_to_a_ref(options: dict[str, Any]) -> None:
    # Blocks of eight bytes, which the kernel does not take; row 0 would copy block 2 to block 1.
    pool = jnp.arange(16.0).reshape(8, 2)
    ref = jax.new_ref(pool)
    arguments = {"tables": jnp.array([[1, 2], [0, 0], [0, 0]], jnp.int32), "block_size": 4, "implementation": None}
    tables, block_size, implementation = (arguments | options).values()
    inputs = _inputs(num_computed_tokens=jnp.array([4, 0, 0], jnp.int32))
    with pytest.raises((AssertionError, ValueError, NotImplementedError)):
        postprocess_mamba(
            [MambaState(temporal=ref)],
            inputs,
            tables,
            block_size=block_size,
            conv_layout="DS",
            implementation=implementation,
        )
    np.testing.assert_array_equal(ref[...], pool)


def test_index_arrays_are_no_refs() -> None:
    ref = jax.new_ref(_ids(3, 2))
    with pytest.raises(AssertionError, match=r"block_tables must be int32 \[batch, columns\].*, got .*Ref"):
        _call(tables=ref)


def test_contracts_hold_at_trace_time_and_nothing_is_donated() -> None:
    state = jax.tree.map(jnp.array, _CONV_4D)

    def step(states: Any) -> Any:
        return postprocess_mamba(states, _inputs(), jnp.zeros((3, 2), jnp.int32), block_size=4, conv_layout="DS")

    for call in (step, jax.jit(step)):
        with pytest.raises(AssertionError, match=r"states\[0\]\.conv must be"):
            call([state])
    assert not state.conv.is_deleted()


def test_array_given_twice_is_refused_by_both_paths() -> None:
    pool = jnp.zeros((8, 4, 5))
    with pytest.raises(ValueError, match=re.escape("states[0].conv and states[2].conv are the same array")):
        postprocess_mamba(
            [MambaState(conv=pool), None, MambaState(conv=pool)],
            _inputs(),
            jnp.zeros((3, 2), jnp.int32),
            block_size=4,
            conv_layout="DS",
        )
    assert not pool.is_deleted()


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_vmap_over_tables_or_states_is_refused(implementation: str) -> None:
    tables = jnp.zeros((2, 3, 2), jnp.int32)
    options = {"block_size": 4, "conv_layout": "DS", "implementation": implementation}
    states = [MambaState(temporal=_STATE.temporal)]
    with pytest.raises(NotImplementedError, match="vmap"):
        jax.vmap(lambda tables: postprocess_mamba(states, _inputs(), tables, **options))(tables)
    two_states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), states)
    with pytest.raises(NotImplementedError, match="vmap"):
        jax.vmap(lambda states: postprocess_mamba(states, _inputs(), tables[0], **options))(two_states)


@pytest.mark.parametrize("states", [[], None, (None, None), {}])
def test_no_states_still_return_the_counter(states: Any) -> None:
    inputs = _inputs(num_accepted_tokens=jnp.array([2, 2, 2], jnp.int32))
    out, counter = _call(states, inputs)
    assert out == states
    # One token computed plus one scheduled minus one draft, two accepted: no boundary of 4 is reached.
    assert counter.tolist() == [2, 2, 2]


def test_empty_batch_still_returns_the_counter() -> None:
    (state,), counter = _call(tables=jnp.zeros((0, 2), jnp.int32))
    assert counter.tolist() == [1, 1, 1]
    np.testing.assert_array_equal(state.conv, _STATE.conv)


def test_table_without_columns_moves_nothing() -> None:
    (state,), _ = _call(tables=jnp.zeros((3, 0), jnp.int32))
    np.testing.assert_array_equal(state.conv, _STATE.conv)


@pytest.mark.parametrize("field", ["num_ctas", "num_warpgroups", "tile_bytes", "stage_bytes"])
@pytest.mark.parametrize("value", [0, -2048, 1000.5, "8", True, 2**31])
def test_kernel_config_checks_its_fields(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"KernelConfig\.{field} must be .*, got {value!r}"):
        KernelConfig(**{field: value})


def test_mamba_state_is_not_validated_when_built() -> None:
    state = jax.tree.map(lambda leaf: leaf.shape, _STATE)
    assert (state.conv, state.temporal) == ((8, 4, 5), (8, 2, 4))
    assert jax.tree.map(lambda _: None, _STATE) == MambaState()


def test_layout_by_name_and_by_member_are_the_same() -> None:
    assert ConvStateLayout.parse("SD") is ConvStateLayout.parse(ConvStateLayout.SD) is ConvStateLayout.SD
