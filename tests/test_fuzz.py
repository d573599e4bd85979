"""Whatever the API takes, on random structures and with any int32 values, against the oracle.

A structure is what tracing sees. CI draws many values for a few structures, since each of them compiles, and a few
random structures; `make fuzz` sets FUZZ_EXAMPLES, and then that many of each are new in every run.
"""

import itertools
import math
import os
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    F32,
    F64,
    I8,
    I64,
    INT_MAX,
    INT_MIN,
    OPERATIONS,
    Case,
    Conv,
    Layer,
    Temporal,
    assert_same_bytes,
    check_case,
    random_states,
    run,
    unoptimized,
    wide_types,
)
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from layouts import row_steps
from pallas_kernels import KernelConfig, PostprocessInputs, PreprocessInputs
from pallas_kernels.plan import Postprocess, Preprocess

_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))


def _settings(in_ci: int) -> hypothesis.settings:
    """Always the same examples in CI; new ones, with a line to reproduce them, when asked for."""
    new = {"max_examples": _EXAMPLES, "print_blob": True} if _EXAMPLES else {"max_examples": in_ci, "derandomize": True}
    return hypothesis.settings(deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck), **new)


def _dtypes(*names: str) -> list[np.dtype]:
    return [np.dtype(getattr(jnp, name)) for name in names]


_KERNEL_DTYPES = _dtypes(
    "bfloat16", "float16", "float32", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float8_e3m4",
    "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu",
)  # fmt: skip
_XLA_DTYPES = _KERNEL_DTYPES + _dtypes("bool_", "complex64", "int2", "uint2", "int4", "uint4", "float4_e2m1fn")
_BF16, _FP8, _COMPLEX, _BOOL, _INT4 = _dtypes("bfloat16", "float8_e5m2", "complex64", "bool_", "int4")


def _every_dtype(dtypes: list[np.dtype], multiple_of: int) -> tuple[Layer, ...]:
    """A layer for each type: odd shapes, windows of 1 to 16 tokens, temporal ranks of 1 to 5."""
    layers = []
    for i, dtype in enumerate(dtypes):
        state_len, shape = 1 + i % 16, (3, 1, 5, 1)[: i % 5]
        dim = (1 + i % 3) * multiple_of // math.gcd(multiple_of, state_len)
        layers.append(Layer(Conv(dim, state_len, dtype), Temporal((*shape, multiple_of), dtype), num_blocks=20))
    return tuple(layers)


_TINY = Layer(Conv(1, 1), Temporal((1,)), num_blocks=20)
_ODD = (
    Layer(Conv(7, 5), Temporal((3, 1, 5)), num_blocks=19, group=1),
    None,
    Layer((Conv(3, 16, _FP8), Conv(1, 2, _COMPLEX)), Temporal((2, 1, 3, 1, 5), _BOOL), num_blocks=1),
    Layer(temporal=(Temporal((5,), I8), Temporal((), F32)), num_blocks=9, group=1),
    Layer(Conv(5, 3, _INT4), num_layers=2, num_blocks=20),
)
_SHARED: dict[str, Any] = {"batch": 4, "columns": 5, "tables": "rubbish"}
_XLA_STRUCTURES = [
    Case("every_dtype", _every_dtype(_XLA_DTYPES, 1), **_SHARED, num_reqs=0),
    Case("tiny", (_TINY,), batch=1, columns=1, block_size=1, null_block_id=None, advanced=True),
    Case("odd", _ODD, **_SHARED, groups=2, mapped=True, extra_slots=2, null_block_id=3),
    Case("eight_bytes", (Layer(Conv(3, 4, I64), Temporal((3,), F64), num_blocks=20),), **_SHARED, x64=True),
    Case("pre_odd", _ODD, operation="pre", **_SHARED, groups=2, mapped=True, num_reqs=0, block_size=1616),
    Case("pre_tiny", (_TINY,), operation="pre", **_SHARED, extra_slots=1, preserve_accepted=True),
    Case("copy_odd", _ODD, operation="copy", **_SHARED, groups=2, num_reqs=0),
    Case("copy_tiny", (_TINY,), operation="copy", **_SHARED, optional_ids=False, null_block_id=None),
]
_SMALL_STAGE = KernelConfig(num_ctas=2, stage_bytes=2048, tile_bytes=2048)
_EVEN = (
    Layer(Conv(16, 5), Temporal((2, 1, 4)), num_blocks=19, group=1),
    Layer((Conv(1, 16, I8),), Temporal((1, 16), _FP8), num_blocks=3, num_layers=2),
)
_KERNEL_STRUCTURES = [
    Case("post", _EVEN, **_SHARED, groups=2, num_reqs=0, config=_SMALL_STAGE),
    Case("post_mapped", _EVEN[:1], **_SHARED, groups=2, mapped=True, extra_slots=1, null_block_id=None),
    Case("pre", _EVEN, operation="pre", **_SHARED, groups=2, extra_slots=1, null_block_id=3),
    Case("copy", _EVEN, operation="copy", **_SHARED, groups=2, num_reqs=0),
]

_INT32 = (
    st.integers(-2, 25)
    | st.sampled_from([INT_MIN, INT_MIN + 1, -(2**30), 2**30, INT_MAX - 1, INT_MAX])
    | st.integers(INT_MIN, INT_MAX)
)


def _vector(length: int, values: st.SearchStrategy[int] = _INT32) -> st.SearchStrategy[np.ndarray]:
    return st.lists(values, min_size=length, max_size=length).map(lambda items: np.array(items, np.int32))


@st.composite
def _distinct(draw: st.DrawFn, count: int, most: int) -> np.ndarray:
    """Integers of which those in [0, most) are distinct, the others anything."""
    inside = draw(st.permutations(range(most)))[:count]
    inside += [-1] * (count - len(inside))
    outside = draw(_vector(count, st.sampled_from([None, None, 0]).map(lambda keep: INT_MIN if keep is None else -1)))
    rubbish = draw(_vector(count, st.integers(INT_MIN, -1) | st.integers(most, INT_MAX)))
    return np.where(outside == INT_MIN, inside, rubbish).astype(np.int32)


@st.composite
def _arguments(draw: st.DrawFn, case: Case, *, conflicts: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the operation of `case` takes behind `states`: any int32, but rows with slots of their own.

    Unless `conflicts`, no block of a pool is named twice.
    """
    most = max(layer.num_blocks for layer in case.layers if layer)

    def ids(*shape: int) -> np.ndarray:
        count = math.prod(shape[1:])
        each = _vector(count, st.integers(-1, most) | _INT32) if conflicts else _distinct(count, most)
        return np.stack([draw(each).reshape(shape[1:]) for _ in range(shape[0])])

    options: dict[str, Any] = {"null_block_id": case.null_block_id}
    count = None if case.num_reqs is None else int(draw(st.integers(-2, 6) | _INT32))
    groups = case.groups or 1
    if case.operation == "copy":
        names = 3 if case.optional_ids else 2
        split = list(np.split(ids(groups, names * case.batch), names, axis=1))
        src, dst, *temporal_src = (array if case.groups else array[0] for array in split)
        optional = (draw(_vector(case.batch)), *temporal_src) if case.optional_ids else ()
        return (src, dst, *optional), options | {"num_copies": count}
    options |= {"block_size": case.block_size, "num_reqs": count}
    slots = case.batch + case.extra_slots
    if case.mapped:
        options["idx_mapping"] = draw(_distinct(case.batch, slots))
    tables = ids(groups, case.batch, case.columns)
    names = ["mamba_state_idx", "num_accepted_tokens", "num_computed_tokens"]
    if case.operation == "post" and not case.advanced:
        names += ["num_scheduled_tokens", "num_draft_tokens"]
    vectors = {name: draw(_vector(slots)) for name in names}
    tables = tables if case.groups else tables[0]
    if case.operation == "pre":
        options["preserve_accepted"] = case.preserve_accepted
        return (PreprocessInputs(**vectors, query_start_loc=draw(_vector(case.batch + 1))), tables), options
    return (PostprocessInputs(**vectors), tables), options


def _check_values(implementation: str, case: Case, layout: str, data: st.DataObject, *, conflicts: bool) -> None:
    states = random_states(np.random.default_rng(0), case.layers, layout)
    arguments, options = data.draw(_arguments(case, conflicts=conflicts))
    options["conv_layout"] = layout
    want = run(case.operation, "oracle", states, *arguments, **options)
    with wide_types(case.x64):
        assert_same_bytes(run(case.operation, implementation, states, *arguments, config=case.config, **options), want)


@pytest.mark.parametrize("layout", ["DS", "SD"])
@pytest.mark.parametrize("case", _XLA_STRUCTURES, ids=[case.name for case in _XLA_STRUCTURES])
@_settings(15)
@hypothesis.given(data=st.data())
def test_xla_agrees_with_the_oracle_on_any_values(case: Case, layout: str, data: st.DataObject) -> None:
    # XLA takes the rows one by one as the oracle does, so the rows may even name each other's blocks.
    _check_values("xla", case, layout, data, conflicts=True)


@pytest.mark.parametrize(
    "implementation", [pytest.param("interpret"), pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("layout", ["DS", "SD"])
@pytest.mark.parametrize("case", _KERNEL_STRUCTURES, ids=[case.name for case in _KERNEL_STRUCTURES])
@_settings(6)
@hypothesis.given(data=st.data())
def test_kernel_agrees_with_the_oracle_on_any_values(
    implementation: str, case: Case, layout: str, data: st.DataObject
) -> None:
    _check_values(implementation, case, layout, data, conflicts=False)


def _destinations(case: Case, arguments: Any, options: dict[str, Any], group: int) -> set[int]:
    """The blocks of a group that the rows may write."""
    if case.operation == "copy":
        return set(np.atleast_2d(arguments[1])[group].tolist())
    inputs, tables = arguments
    tables = tables.reshape(-1, case.batch, case.columns)
    steps = row_steps(
        inputs,
        batch=case.batch,
        block_size=case.block_size,
        idx_mapping=options.get("idx_mapping"),
        num_reqs=options["num_reqs"],
    )
    return {
        int(tables[group, step.row, step.dst_col]) for step in steps if step.copies and 0 <= step.dst_col < case.columns
    }


@pytest.mark.parametrize(
    "implementation", [pytest.param("interpret"), pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("case", _KERNEL_STRUCTURES[:2], ids=[case.name for case in _KERNEL_STRUCTURES[:2]])
@_settings(10)
@hypothesis.given(data=st.data())
def test_rows_that_are_in_each_others_way_change_no_other_byte(
    implementation: str, case: Case, data: st.DataObject
) -> None:
    # What such a step leaves in the blocks that it writes is not defined, so there are races to be ignored.
    states = random_states(np.random.default_rng(0), case.layers, "DS")
    arguments, options = data.draw(_arguments(case, conflicts=True))
    _, want = run(case.operation, "oracle", states, *arguments, conv_layout="DS", **options)
    written = [_destinations(case, arguments, options, group) for group in range(case.groups)]
    traced = {name: options.pop(name) for name in ("idx_mapping",) if name in options}
    interpret = implementation == "interpret" and plgpu.InterpretGPUParams()
    operation, _ = OPERATIONS[case.operation]
    with unoptimized():
        after, counter = operation(
            *jax.tree.map(jnp.array, (states, *arguments)),
            conv_layout="DS",
            config=case.config,
            implementation="mosaic_gpu",
            interpret=interpret,
            **jax.tree.map(jnp.array, traced),
            **options,
        )
    np.testing.assert_array_equal(counter, want)
    for old, new in zip(states, after, strict=True):
        for before, got in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
            axis = 1 if old.stacked else 0
            kept = [block for block in range(before.shape[axis]) if block not in written[old.group]]
            assert_same_bytes(np.asarray(got).take(kept, axis), before.take(kept, axis))


def _layer(dtypes: list[np.dtype], multiple_of: int) -> st.SearchStrategy[Layer]:
    """Layers of any shape whose blocks hold a multiple of `multiple_of` elements, conv rows not always."""
    conv = st.builds(
        lambda dim, state_len, dtype: Conv(dim * multiple_of // math.gcd(multiple_of, state_len), state_len, dtype),
        st.integers(1, 160),
        st.integers(1, 16),
        st.sampled_from(dtypes),
    )
    temporal = st.builds(
        lambda shape, dtype: Temporal((*shape, multiple_of) if multiple_of > 1 else tuple(shape), dtype),
        st.lists(st.integers(1, 5), max_size=5),
        st.sampled_from(dtypes),
    )
    return st.builds(
        Layer,
        conv=st.none() | conv | st.tuples(conv, conv),
        temporal=st.none() | temporal | st.tuples(temporal, temporal),
        num_blocks=st.integers(1, 40),
        num_layers=st.none() | st.integers(1, 2),
        group=st.integers(0, 1),
    )


def _structure(dtypes: list[np.dtype], multiple_of: int) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        name=st.just("random"),
        layers=st.lists(st.none() | _layer(dtypes, multiple_of), min_size=1, max_size=3)
        .map(tuple)
        .filter(any)
        .map(lambda layers: (*layers, Layer(num_blocks=40))),
        batch=st.integers(1, 6),
        columns=st.integers(1, 6),
        block_size=st.sampled_from([1, 2, 3, 8, 1616]),
        max_draft=st.integers(0, 8),
        tables=st.sampled_from(["distinct", "aliased", "rubbish"]),
        groups=st.just(2),
        extra_slots=st.integers(0, 2),
        num_reqs=st.none() | st.integers(-2, 8),
        null_block_id=st.sampled_from([None, 0, 3]),
        operation=st.sampled_from(["post", "pre", "copy"]),
        advanced=st.booleans(),
        mapped=st.booleans(),
        preserve_accepted=st.booleans(),
        optional_ids=st.booleans(),
        config=st.sampled_from([KernelConfig(num_ctas=2, stage_bytes=size, tile_bytes=size) for size in (2048, 16384)]),
        seed=st.integers(0, 2**16),
    )


_structures_checked = itertools.count(1)


def _check_structure(implementation: str, case: Case, layout: str) -> None:
    check_case(implementation, case, layout)
    # JAX keeps what it compiled, in pieces of memory of which a process may have 65530: some hundred programs of the
    # interpreter take them all, and XLA crashes.
    if next(_structures_checked) % 50 == 0:
        jax.clear_caches()


@pytest.mark.parametrize("layout", ["DS", "SD"])
@_settings(7)
@hypothesis.given(case=_structure(_XLA_DTYPES, 1))
def test_xla_agrees_with_the_oracle_on_any_structure(layout: str, case: Case) -> None:
    _check_structure("xla", case, layout)


@pytest.mark.parametrize("layout", ["DS", "SD"])
@_settings(4)
@hypothesis.given(case=_structure(_KERNEL_DTYPES, 16))
def test_interpreted_kernel_agrees_with_the_oracle_on_any_structure(layout: str, case: Case) -> None:
    _check_structure("interpret", case, layout)


_TOKENS = st.integers(0, INT_MAX - 64) | st.integers(0, 100) | st.integers(INT_MAX - 200, INT_MAX - 64)


@_settings(200)
@hypothesis.given(
    block_size=st.sampled_from([1, 2, 3, 16, 1616, 2**30, INT_MAX]),
    computed=_TOKENS,
    draft=st.integers(0, 30),
    accepted=st.integers(1, 31),
    idx=st.integers(-1, INT_MAX - 64),
)
def test_planner_does_not_wrap_on_counts_in_range(
    block_size: int, computed: int, draft: int, accepted: int, idx: int
) -> None:
    """The rules of the README, with integers that cannot wrap."""
    accepted = min(accepted, draft + 1)
    running = computed + 1
    new = running + accepted - 1
    boundary, offset = new // block_size, new // block_size * block_size - running
    crosses = offset >= 0 and idx >= 0 and boundary >= 1
    columns = [idx, idx + offset, boundary - 1]
    scheduled = 1 + draft
    for counts in ([computed, scheduled, draft], [new]):
        operation = Postprocess(block_size, advanced=len(counts) == 1)
        values = [jnp.int32(value) for value in (idx, accepted, *counts)]
        decision = operation.decide(values, jnp.bool_(True))
        assert bool(decision.copies) == (crosses and (columns[0] != columns[2] or offset != 0))
        assert int(decision.updates[0]) == (1 if crosses and columns[0] == columns[2] else accepted)
        if crosses:
            assert [int(column) for column in operation.block_ids(values, 0, lambda column: column)] == columns
            assert int(decision.offset) == offset
    new_col = (computed + scheduled - 1) // block_size
    values = [jnp.int32(value) for value in (idx, accepted, computed, INT_MAX - scheduled, INT_MAX)]
    operation = Preprocess(block_size, preserve_accepted=False)
    decision = operation.decide(values, jnp.bool_(True))
    assert bool(decision.copies) == (idx >= 0 and idx != new_col)
    assert int(decision.updates[0]) == new_col
    assert [int(column) for column in operation.block_ids(values, 0, lambda column: column)] == [
        idx, idx + accepted - 1, new_col,
    ]  # fmt: skip
