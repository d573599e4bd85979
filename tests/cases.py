"""The shared cases: steps that every implementation runs, and the comparison of every byte."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts import ConvStateLayout, MambaState
from pallas_kernels import KernelConfig, PostprocessInputs, postprocess_mamba, postprocess_mamba_ref

IMPLEMENTATIONS = [
    pytest.param("xla"),
    pytest.param("interpret"),
    pytest.param("mosaic_gpu", marks=pytest.mark.gpu),
]

BF16 = np.dtype(jnp.bfloat16)
FP8 = np.dtype(jnp.float8_e4m3fn)
F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
I8, I64, U16 = np.dtype(np.int8), np.dtype(np.int64), np.dtype(np.uint16)
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Conv:
    """A conv pool: channels, tokens of a window, type."""

    dim: int
    state_len: int
    dtype: np.dtype = BF16


@dataclasses.dataclass(frozen=True)
class Temporal:
    """A temporal pool: shape of a block, type."""

    shape: tuple[int, ...]
    dtype: np.dtype = F32


@dataclasses.dataclass(frozen=True)
class Layer:
    """One MambaState: its pools, its table, and how many layers are stacked in it (None: not stacked)."""

    conv: Conv | tuple[Conv, ...] | None = None
    temporal: Temporal | tuple[Temporal, ...] | None = None
    num_blocks: int = 40
    group: int = 0
    num_layers: int | None = None


_DEFAULT_CONFIG = KernelConfig(num_ctas=3)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step. Request values and pool bytes are drawn from `seed`; live rows never share a block.

    Attributes:
      tables: "distinct" blocks, "aliased" (neighbouring columns of a row name one block) or "rubbish"
        (ids out of range, null ids, and request values out of all bounds among good ones).
      groups: None for a 2-D block table.
      advanced: whether `num_computed_tokens` holds the final count already.
    """

    name: str
    layers: tuple[Layer | None, ...]
    batch: int = 6
    columns: int = 6
    block_size: int = 3
    max_draft: int = 4
    tables: str = "distinct"
    groups: int | None = None
    extra_slots: int = 0
    num_reqs: int | None = None
    null_block_id: int | None = 0
    advanced: bool = False
    config: KernelConfig = _DEFAULT_CONFIG
    x64: bool = False
    layouts: tuple[str, ...] = ("DS", "SD")
    seed: int = 0


def _two(conv: Conv | None, temporal: Temporal | None, **fields: Any) -> tuple[Layer, ...]:
    return (Layer(conv, temporal, **fields),) * 2


_SMALL_STAGE = KernelConfig(num_ctas=3, stage_bytes=2048)
_SMALL = _two(Conv(40, 5), Temporal((4, 64)))
_RUBBISH = _two(Conv(40, 5), Temporal((4, 64)), num_blocks=60)

CASES = [
    Case("small_pools", _SMALL),
    Case("one_request", _SMALL, batch=1, block_size=1, seed=1),
    Case("block_size_1", _SMALL, block_size=1),
    Case("block_size_1616", _two(Conv(40, 5), Temporal((4, 64)), num_blocks=64), block_size=1616, batch=10),
    Case("already_advanced_counts", _SMALL, advanced=True),
    Case("padded_batch", _SMALL, num_reqs=3),
    Case("no_live_request", _SMALL, num_reqs=0),
    Case("negative_num_reqs", _SMALL, num_reqs=-1),
    Case("num_reqs_beyond_batch", _SMALL, num_reqs=1000),
    Case("more_slots_than_rows", _SMALL, extra_slots=3),
    Case("no_null_block", _SMALL, null_block_id=None, seed=1),
    Case("null_block_in_the_middle", _SMALL, null_block_id=17, seed=2),
    Case("null_block_beyond_int32", _SMALL, null_block_id=2**40),
    Case("offset_beyond_window", _two(Conv(40, 2), Temporal((4, 64))), max_draft=6, block_size=8),
    Case("two_columns_one_block", _SMALL, tables="aliased"),
    Case("rubbish", _RUBBISH, tables="rubbish", batch=9, num_reqs=8, seed=3),
    Case("rubbish_advanced", _RUBBISH, tables="rubbish", batch=9, advanced=True, seed=4),
    Case("batch_127", _two(Conv(16, 4), Temporal((4,)), num_blocks=260), batch=127, columns=2, block_size=4),
    Case("batch_130", _two(Conv(16, 4), Temporal((4,)), num_blocks=270), batch=130, columns=2, block_size=4),
    Case(
        "batch_of_three_chunks",
        (Layer(Conv(8, 4), num_blocks=1100),),
        batch=1027,
        columns=1,
        block_size=2,
        max_draft=1,
        config=KernelConfig(num_ctas=2),
        layouts=("DS",),
    ),
    Case("partial_last_tiles", _two(Conv(528, 5), Temporal((4, 520))), config=_SMALL_STAGE),
    Case("window_of_one_token", _two(Conv(16, 1), Temporal((8,)))),
    Case("window_of_sixteen_tokens", _two(Conv(24, 16), Temporal((2, 4))), max_draft=8),
    Case("one_channel", (Layer(Conv(1, 8), Temporal((1, 1, 4))),)),
    Case("one_byte_types", _two(Conv(24, 4, I8), Temporal((6, 8), FP8)), max_draft=3),
    Case("fp8_conv", _two(Conv(80, 3, FP8), Temporal((16,), I8)), max_draft=2),
    Case("rows_not_aligned", _two(Conv(12, 4, F16), Temporal((3, 8), F16)), max_draft=3),
    Case("rows_not_aligned_in_many_steps", _two(Conv(330, 8, F16), Temporal((8,))), block_size=4, config=_SMALL_STAGE),
    Case("eight_byte_types", _two(Conv(10, 4, I64), Temporal((3, 2), F64)), x64=True),
    Case(
        "mixed_types_and_geometries",
        (
            Layer(Conv(40, 5), Temporal((4, 64))),
            None,
            Layer(Conv(24, 4, F32), Temporal((2, 4, 16), F16), num_blocks=30),
            Layer(Conv(64, 3, FP8), Temporal((7, 16), I8)),
            Layer(Conv(8, 9, U16)),
            Layer(temporal=Temporal((4, 64))),
        ),
    ),
    Case(
        "several_arrays_in_a_state",
        (Layer((Conv(16, 4), Conv(16, 4), Conv(32, 4)), (Temporal((8,)), Temporal((2, 8), BF16))),),
    ),
    Case(
        "groups",
        (Layer(Conv(40, 5), Temporal((4, 64)), group=1), Layer(Conv(40, 5), Temporal((4, 64)))),
        groups=3,
    ),
    Case("stacked_layers", (Layer(Conv(40, 5), Temporal((4, 64)), num_layers=3), *_SMALL)),
]

EVERY_CASE = [pytest.param(case, layout, id=f"{case.name}-{layout}") for case in CASES for layout in case.layouts]


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of random bits, NaN patterns included; types that leave bits of a byte unused get random values."""
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if dtype.name.endswith("int4"):
        return rng.integers(-8 if dtype.name == "int4" else 0, 8, shape).astype(dtype)
    if dtype.name == "float4_e2m1fn":
        return rng.integers(0, 16, shape, dtype=np.uint8).view(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    return rng.integers(0, 256, count, dtype=np.uint8).view(dtype).reshape(shape)


def random_states(rng: np.random.Generator, layers: tuple[Layer | None, ...], layout: str) -> list[MambaState | None]:
    """Pools of random bits for `layers`."""

    def array(layer: Layer, spec: Conv | Temporal) -> np.ndarray:
        lead = () if layer.num_layers is None else (layer.num_layers,)
        if isinstance(spec, Conv):
            shape = ConvStateLayout(layout).shape(layer.num_blocks, spec.dim, spec.state_len)
        else:
            shape = (layer.num_blocks, *spec.shape)
        return random_bits(rng, (*lead, *shape), spec.dtype)

    def arrays(layer: Layer, spec: Any) -> Any:
        return tuple(array(layer, part) for part in spec) if isinstance(spec, tuple) else spec and array(layer, spec)

    return [
        layer
        and MambaState(
            conv=arrays(layer, layer.conv),
            temporal=arrays(layer, layer.temporal),
            group=layer.group,
            stacked=layer.num_layers is not None,
        )
        for layer in layers
    ]


def random_step(case: Case) -> tuple[PostprocessInputs, np.ndarray]:
    """Request vectors and block tables of a plausible (or rubbish) step."""
    rng = np.random.default_rng(case.seed)
    slots = case.batch + case.extra_slots
    draft = rng.integers(0, case.max_draft + 1, slots)
    accepted = np.array([rng.integers(1, most + 2) for most in draft])
    computed = rng.integers(0, case.block_size * case.columns, slots)
    # Half of the rows stand just before a boundary.
    near = rng.integers(1, case.columns + 1, slots) * case.block_size - rng.integers(1, case.max_draft + 2, slots)
    computed = np.where(rng.random(slots) < 0.5, np.maximum(near, 0), computed)
    idx = np.maximum((computed - 1) // case.block_size + rng.integers(-1, 2, slots), -1)
    num_blocks = max(layer.num_blocks for layer in case.layers if layer)
    groups = case.groups or 1
    tables = np.stack(
        [
            rng.permutation(num_blocks)[: case.batch * case.columns].reshape(case.batch, case.columns)
            for _ in range(groups)
        ]
    )
    vectors = [idx, accepted, computed, draft + 1, draft]
    if case.tables == "aliased":
        tables = tables[:, :, np.arange(case.columns) // 2 * 2]
    elif case.tables == "rubbish":
        bad_ids = [-1, INT_MIN, INT_MAX, num_blocks, num_blocks + 7, 0]
        tables = np.where(rng.random(tables.shape) < 0.2, rng.choice(bad_ids, tables.shape), tables)
        bad = [-1, 0, INT_MIN, INT_MAX, INT_MAX - 1, case.columns, 10**6]
        vectors = [np.where(rng.random(slots) < 0.2, rng.choice(bad, slots), vector) for vector in vectors]
    idx, accepted, computed, scheduled, draft = (vector.astype(np.int32) for vector in vectors)
    if case.advanced:
        with np.errstate(over="ignore"):
            computed = computed + scheduled - draft + accepted - 1
        scheduled = draft = None
    inputs = PostprocessInputs(
        mamba_state_idx=idx,
        num_accepted_tokens=accepted,
        num_computed_tokens=computed,
        num_scheduled_tokens=scheduled,
        num_draft_tokens=draft,
    )
    return inputs, (tables if case.groups else tables[0]).astype(np.int32)


def run_postprocess(implementation: str, states: Any, inputs: Any, block_tables: Any, **options: Any) -> Any:
    """`postprocess_mamba` on fresh device arrays, by the name of an entry of `IMPLEMENTATIONS`."""
    states, inputs, block_tables = jax.tree.map(jnp.array, (states, inputs, block_tables))
    config = options.pop("config", None)
    if implementation == "interpret":
        options |= {"interpret": True, "config": config or _DEFAULT_CONFIG}
    elif implementation != "oracle":
        options |= {"implementation": implementation, "config": config}
    function = postprocess_mamba_ref if implementation == "oracle" else postprocess_mamba
    return function(states, inputs, block_tables, **options)


def check_case(implementation: str, case: Case, layout: str) -> None:
    """Runs a case and compares every byte of every pool, and the counters, with the oracle."""
    states = random_states(np.random.default_rng(case.seed), case.layers, layout)
    inputs, tables = random_step(case)
    options = {
        "block_size": case.block_size,
        "conv_layout": layout,
        "num_reqs": case.num_reqs,
        "null_block_id": case.null_block_id,
    }
    want = postprocess_mamba_ref(states, inputs, tables, **options)
    with jax.enable_x64(case.x64):
        got = run_postprocess(implementation, states, inputs, tables, config=case.config, **options)
        assert_same_bytes(got, want)


def assert_same_bytes(got: Any, want: Any) -> None:
    """Asserts equal tree structure, shapes, types and bits; names the first leaf that differs."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        name = jax.tree_util.keystr(path)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        differing = np.flatnonzero(as_bytes(a) != as_bytes(b))
        assert differing.size == 0, f"{name}: {differing.size} bytes differ, the first at {differing[0]}"


def as_bytes(array: Any) -> np.ndarray:
    """The bytes of an array, flat."""
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)


@functools.cache
def changed_bytes(case: Case, layout: str) -> int:
    """How many bytes of the pools the oracle changes."""
    states = random_states(np.random.default_rng(case.seed), case.layers, layout)
    inputs, tables = random_step(case)
    after, _ = postprocess_mamba_ref(
        states,
        inputs,
        tables,
        block_size=case.block_size,
        conv_layout=layout,
        num_reqs=case.num_reqs,
        null_block_id=case.null_block_id,
    )
    pairs = zip(jax.tree.leaves(states), jax.tree.leaves(after), strict=True)
    return sum(int((as_bytes(a) != as_bytes(b)).sum()) for a, b in pairs)
