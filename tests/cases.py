"""The shared cases: steps that every implementation runs, and the comparison of every byte."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts import ConvStateLayout, MambaState
from pallas_kernels import (
    KernelConfig,
    PostprocessInputs,
    PreprocessInputs,
    copy_mamba_blocks,
    copy_mamba_blocks_ref,
    postprocess_mamba,
    postprocess_mamba_ref,
    preprocess_mamba,
    preprocess_mamba_ref,
)

IMPLEMENTATIONS = [
    pytest.param("xla"),
    pytest.param("interpret"),
    pytest.param("mosaic_gpu", marks=pytest.mark.gpu),
]

OPERATIONS = {
    "post": (postprocess_mamba, postprocess_mamba_ref),
    "pre": (preprocess_mamba, preprocess_mamba_ref),
    "copy": (copy_mamba_blocks, copy_mamba_blocks_ref),
}

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


_DEFAULT_CONFIG = KernelConfig(num_ctas=2)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step. Request values and pool bytes are drawn from `seed`; live rows never share a block.

    Attributes:
      operation: "post", "pre" or "copy" (whose rows are `batch`).
      tables: "distinct" blocks, "aliased" (neighbouring columns of a row name one block) or "rubbish"
        (ids out of range, null ids, and request values out of all bounds among good ones).
      groups: None for a 2-D block table.
      copying: which rows may copy: so many, spread over the batch, and the last four; None for all. The others
        have no running column, or are copied onto themselves. The time of the interpreter's race detection grows
        with the square of the copies.
      advanced: whether `num_computed_tokens` holds the final count already (post).
      mapped: whether rows find their slots through an `idx_mapping`, some of it negative.
      preserve_accepted: the option of that name (pre).
      optional_ids: whether token offsets and temporal sources are given (copy).
    """

    name: str
    layers: tuple[Layer | None, ...]
    operation: str = "post"
    batch: int = 6
    columns: int = 6
    block_size: int = 3
    max_draft: int = 4
    copying: int | None = None
    tables: str = "distinct"
    groups: int | None = None
    extra_slots: int = 0
    num_reqs: int | None = None
    null_block_id: int | None = 0
    advanced: bool = False
    mapped: bool = False
    preserve_accepted: bool = False
    optional_ids: bool = True
    config: KernelConfig = _DEFAULT_CONFIG
    x64: bool = False
    layouts: tuple[str, ...] = ("DS", "SD")
    seed: int = 0


def _two(conv: Conv | None, temporal: Temporal | None, **fields: Any) -> tuple[Layer, ...]:
    return (Layer(conv, temporal, **fields),) * 2


_SMALL_STAGE = KernelConfig(num_ctas=2, stage_bytes=2048, tile_bytes=2048)
_SMALL = _two(Conv(40, 5), Temporal((4, 64)))
_RUBBISH = _two(Conv(40, 5), Temporal((4, 64)), num_blocks=60)
# For what has nothing to do with the choice of a pool, so that more of these compile in the same time.
_ONE = (Layer(Conv(40, 5), Temporal((4, 64))),)

CASES = [
    Case("small_pools", _SMALL),
    Case("one_request", _ONE, batch=1, block_size=1, seed=1, layouts=("DS",)),
    Case("block_size_1", _ONE, block_size=1, layouts=("DS",)),
    Case(
        "block_size_1616",
        (Layer(Conv(40, 5), Temporal((4, 64)), num_blocks=64),),
        block_size=1616,
        batch=10,
        layouts=("SD",),
    ),
    Case("already_advanced_counts", _ONE, advanced=True, layouts=("SD",)),
    Case("padded_batch", _ONE, num_reqs=3, layouts=("DS",)),
    Case("no_live_request", _ONE, num_reqs=0, layouts=("DS",)),
    Case("negative_num_reqs", _ONE, num_reqs=-1, layouts=("DS",)),
    Case("num_reqs_beyond_batch", _ONE, num_reqs=1000, layouts=("DS",)),
    Case("more_slots_than_rows", _ONE, extra_slots=3, layouts=("DS",)),
    Case("no_null_block", _ONE, null_block_id=None, seed=1, layouts=("SD",)),
    Case("null_block_in_the_middle", _ONE, null_block_id=17, seed=2, layouts=("DS",)),
    Case("null_block_beyond_int32", _ONE, null_block_id=2**40, layouts=("SD",)),
    Case("offset_beyond_window", (Layer(Conv(40, 2), Temporal((4, 64))),), max_draft=6, block_size=8),
    Case("two_columns_one_block", _SMALL, tables="aliased"),
    Case("rubbish", _RUBBISH, tables="rubbish", batch=9, num_reqs=8, seed=3),
    Case("rubbish_advanced", _RUBBISH, tables="rubbish", batch=9, advanced=True, seed=4, layouts=("DS",)),
    Case(
        "batch_127",
        (Layer(Conv(16, 4), Temporal((4,)), num_blocks=260),),
        batch=127,
        copying=48,
        columns=2,
        block_size=4,
        layouts=("DS",),
    ),
    Case(
        "batch_128",
        (Layer(Conv(16, 4), Temporal((4,)), num_blocks=260),),
        batch=128,
        copying=12,
        columns=2,
        block_size=4,
        num_reqs=128,
        layouts=("SD",),
    ),
    Case(
        "batch_130",
        (Layer(Conv(16, 4), Temporal((4,)), num_blocks=270),),
        batch=130,
        copying=48,
        columns=2,
        block_size=4,
        layouts=("SD",),
    ),
    Case(
        "batch_of_two_chunks",
        (Layer(Conv(8, 4), num_blocks=1040),),
        batch=518,
        copying=250,
        columns=1,
        block_size=2,
        max_draft=1,
        config=KernelConfig(num_ctas=2),
        layouts=("DS",),
    ),
    Case("partial_last_tiles", _two(Conv(1032, 5), Temporal((4, 520))), config=_SMALL_STAGE),
    Case("window_of_one_token", (Layer(Conv(16, 1), Temporal((8,))),), layouts=("DS",)),
    Case("window_of_forty_tokens", (Layer(Conv(16, 40), Temporal((8,))),), max_draft=20, block_size=8, layouts=("SD",)),
    Case("window_of_sixteen_tokens", (Layer(Conv(24, 16), Temporal((2, 4))),), max_draft=8),
    Case("one_channel", (Layer(Conv(1, 8), Temporal((1, 1, 4))),)),
    Case("one_byte_types", (Layer(Conv(24, 4, I8), Temporal((6, 8), FP8)),), max_draft=3),
    Case("fp8_conv", (Layer(Conv(80, 3, FP8), Temporal((16,), I8)),), max_draft=2),
    Case("rows_not_aligned", (Layer(Conv(12, 4, F16), Temporal((3, 8), F16)),), max_draft=3),
    Case(
        "rows_not_aligned_in_many_steps", (Layer(Conv(330, 8, F16), Temporal((8,))),), block_size=4, config=_SMALL_STAGE
    ),
    Case(
        "rows_not_aligned_with_a_short_last_step",
        (Layer(Conv(200, 4, I8)),),
        operation="copy",
        batch=3,
        tables="aliased",
        config=_SMALL_STAGE,
        layouts=("SD",),
        seed=3,
    ),
    Case("eight_byte_types", (Layer(Conv(10, 4, I64), Temporal((3, 2), F64)),), x64=True),
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
        layouts=("SD",),
    ),
    Case("mapped", _SMALL, mapped=True, extra_slots=5, layouts=("SD",)),
    Case("mapped_to_fewer_slots", _ONE, mapped=True, extra_slots=-2, batch=6, layouts=("DS",)),
    Case("mapped_padded", _ONE, mapped=True, extra_slots=3, num_reqs=4, seed=5, layouts=("SD",)),
    Case("mapped_rubbish", _RUBBISH, mapped=True, extra_slots=4, tables="rubbish", batch=9, seed=6, layouts=("DS",)),
    Case("mapped_advanced", _ONE, mapped=True, extra_slots=1, advanced=True, layouts=("SD",)),
    Case(
        "mapped_batch_128",
        (Layer(Conv(16, 4), num_blocks=260),),
        batch=128,
        copying=12,
        columns=2,
        block_size=4,
        mapped=True,
        extra_slots=7,
        layouts=("DS",),
    ),
    Case(
        "mapped_in_two_chunks",
        (Layer(Conv(8, 4), num_blocks=1040),),
        batch=518,
        copying=48,
        columns=1,
        block_size=2,
        max_draft=1,
        mapped=True,
        extra_slots=300,
        config=KernelConfig(num_ctas=1),
        layouts=("DS",),
    ),
    Case("pre", _SMALL, operation="pre"),
    Case("pre_one_request", _ONE, operation="pre", batch=1, seed=4, layouts=("DS",)),
    Case("pre_block_size_1", _ONE, operation="pre", block_size=1, columns=8, batch=5, layouts=("SD",)),
    Case("pre_preserving_the_counter", _ONE, operation="pre", preserve_accepted=True, layouts=("DS",)),
    Case("pre_padded_batch", _ONE, operation="pre", num_reqs=4, extra_slots=2, layouts=("SD",)),
    Case("pre_two_columns_one_block", _SMALL, operation="pre", tables="aliased", seed=1, layouts=("DS",)),
    Case("pre_rubbish", _RUBBISH, operation="pre", tables="rubbish", batch=9, extra_slots=1, seed=8, layouts=("SD",)),
    Case("pre_mapped", _ONE, operation="pre", mapped=True, extra_slots=5, layouts=("SD",)),
    Case(
        "pre_mapped_rubbish", _RUBBISH, operation="pre", mapped=True, tables="rubbish", batch=9, seed=9, layouts=("DS",)
    ),
    Case(
        "pre_batch_130",
        (Layer(Conv(16, 4), Temporal((4,)), num_blocks=270),),
        operation="pre",
        batch=130,
        copying=12,
        columns=2,
        layouts=("SD",),
    ),
    Case(
        "pre_groups_and_stacked_layers",
        (Layer(Conv(40, 5), Temporal((4, 64)), group=1, num_layers=2), Layer(Conv(24, 3, F32), Temporal((8,)))),
        operation="pre",
        groups=2,
        layouts=("DS",),
    ),
    Case(
        "pre_in_two_chunks",
        (Layer(Conv(8, 4), num_blocks=1040),),
        operation="pre",
        batch=515,
        copying=32,
        columns=2,
        extra_slots=600,
        config=KernelConfig(num_ctas=1),
        layouts=("SD",),
    ),
    Case(
        "pre_two_whole_chunks",
        (Layer(Conv(8, 4), num_blocks=2060),),
        operation="pre",
        batch=1024,
        copying=24,
        columns=2,
        config=KernelConfig(num_ctas=1),
        layouts=("DS",),
    ),
    Case(
        "pre_with_one_whole_chunk_of_two",
        (Layer(Conv(8, 4), num_blocks=1040),),
        operation="pre",
        batch=512,
        copying=32,
        columns=2,
        extra_slots=512,
        config=KernelConfig(num_ctas=1),
        layouts=("DS",),
    ),
    Case(
        "copy_in_two_chunks",
        (Layer(temporal=Temporal((4,)), num_blocks=1600, group=1),),
        operation="copy",
        groups=2,
        batch=515,
        copying=32,
        tables="aliased",
        optional_ids=False,
        config=KernelConfig(num_ctas=1),
        layouts=("DS",),
    ),
    Case(
        "copy_many_groups",
        tuple(Layer(temporal=Temporal((4,)), group=group) for group in range(12)),
        operation="copy",
        groups=14,
        batch=3,
        layouts=("DS",),
    ),
    Case("copy", _SMALL, operation="copy"),
    Case("copy_without_optional_ids", _ONE, operation="copy", optional_ids=False, layouts=("SD",)),
    Case("copy_padded", _ONE, operation="copy", num_reqs=4, layouts=("DS",)),
    Case("copy_one_row", _ONE, operation="copy", batch=1, layouts=("SD",)),
    Case("copy_rubbish", _RUBBISH, operation="copy", batch=9, tables="rubbish", null_block_id=None, layouts=("DS",)),
    Case("copy_onto_itself", _SMALL, operation="copy", tables="aliased"),
    Case(
        "copy_groups",
        (Layer(Conv(40, 5), Temporal((4, 64)), group=1), Layer(Conv(16, 4), group=0), Layer(temporal=Temporal((4,)))),
        operation="copy",
        groups=3,
        batch=5,
        layouts=("SD",),
    ),
    Case("stacked_layers", (Layer(Conv(40, 5), Temporal((4, 64)), num_layers=3), *_SMALL)),
]


def structure(case: Case) -> Case:
    """What tracing sees of a case: cases of equal structure compile once, and lower to the same kernel."""
    num_reqs = None if case.num_reqs is None else 0
    null_block_id = None if case.null_block_id == 2**40 else case.null_block_id
    values = {"num_reqs": num_reqs, "null_block_id": null_block_id}
    return dataclasses.replace(case, name="", layouts=(), max_draft=0, copying=None, tables="", seed=0, **values)


def _params(*, distinct: bool) -> Iterator[Any]:
    """Each case in each of its layouts, or one case of each structure; equal structures go to one worker."""
    first: dict[tuple[Case, str], str] = {}
    for case in CASES:
        for layout in case.layouts:
            name = f"{case.name}-{layout}"
            group = first.setdefault((structure(case), layout), name)
            if group == name or not distinct:
                yield pytest.param(case, layout, id=name, marks=pytest.mark.xdist_group(group))


EVERY_CASE = list(_params(distinct=False))
EVERY_STRUCTURE = list(_params(distinct=True))


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of random bits, NaN patterns included; types that leave bits of a byte unused get random values."""
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if dtype.name in ("int2", "uint2", "int4", "uint4"):
        limits = jnp.iinfo(dtype)
        return rng.integers(int(limits.min), int(limits.max) + 1, shape).astype(dtype)
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


def random_arguments(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a plausible (or rubbish) step behind `states`, and its options except the layout."""
    rng = np.random.default_rng(case.seed)
    options: dict[str, Any] = {"null_block_id": case.null_block_id}
    if case.operation == "copy":
        return _random_ids(rng, case), options | {"num_copies": case.num_reqs}
    options |= {"block_size": case.block_size, "num_reqs": case.num_reqs}
    slots = case.batch + case.extra_slots
    if case.mapped:
        mapping = np.full(case.batch, -1)
        rows = rng.permutation(case.batch)[: min(case.batch - 1, slots) or 1]
        mapping[rows] = rng.permutation(slots)[: len(rows)]
        if case.tables == "rubbish":
            mapping[mapping < 0] = rng.choice([INT_MIN, slots, INT_MAX, -1], (mapping < 0).sum())
        options["idx_mapping"] = mapping.astype(np.int32)
    draft = rng.integers(0, case.max_draft + 1, slots)
    accepted = np.array([rng.integers(1, most + 2) for most in draft])
    computed = rng.integers(0, case.block_size * case.columns, slots)
    # Half of the rows stand just before a boundary.
    near = rng.integers(1, case.columns + 1, slots) * case.block_size - rng.integers(1, case.max_draft + 2, slots)
    computed = np.where(rng.random(slots) < 0.5, np.maximum(near, 0), computed)
    idx = np.maximum((computed - 1) // case.block_size + rng.integers(-1, 2, slots), -1)
    idle = _idle_rows(case)
    idle_slots = options["idx_mapping"][idle] if case.mapped else idle
    idx[idle_slots[idle_slots >= 0]] = -1
    num_blocks = max(layer.num_blocks for layer in case.layers if layer)
    tables = _random_tables(rng, case, num_blocks)
    vectors = [idx, accepted, computed, draft + 1, draft]
    query_start_loc = np.concatenate([[0], np.cumsum(rng.integers(1, case.max_draft + 2, case.batch))])
    if case.tables == "rubbish":
        bad = [-1, 0, INT_MIN, INT_MAX, INT_MAX - 1, case.columns, 10**6]
        vectors = [_spoil(rng, vector, bad) for vector in vectors]
        query_start_loc = _spoil(rng, query_start_loc, bad)
    idx, accepted, computed, scheduled, draft = (vector.astype(np.int32) for vector in vectors)
    common = {"mamba_state_idx": idx, "num_accepted_tokens": accepted, "num_computed_tokens": computed}
    tables = (tables if case.groups else tables[0]).astype(np.int32)
    if case.operation == "pre":
        options["preserve_accepted"] = case.preserve_accepted
        return (PreprocessInputs(**common, query_start_loc=query_start_loc.astype(np.int32)), tables), options
    if case.advanced:
        with np.errstate(over="ignore"):
            common["num_computed_tokens"] = computed + scheduled - draft + accepted - 1
        return (PostprocessInputs(**common), tables), options
    return (PostprocessInputs(**common, num_scheduled_tokens=scheduled, num_draft_tokens=draft), tables), options


def _idle_rows(case: Case) -> np.ndarray:
    """The rows that may not copy."""
    if case.copying is None:
        return np.arange(0)
    spread = np.linspace(0, case.batch - 1, case.copying).astype(int)
    return np.setdiff1d(np.arange(case.batch), [*spread, *range(case.batch - 4, case.batch)])


def _spoil(rng: np.random.Generator, values: np.ndarray, bad: list[int]) -> np.ndarray:
    """Replaces about a fifth of `values` by bad ones."""
    return np.where(rng.random(values.shape) < 0.2, rng.choice(bad, values.shape), values)


def _random_tables(rng: np.random.Generator, case: Case, num_blocks: int) -> np.ndarray:
    size = case.batch * case.columns
    tables = [rng.permutation(num_blocks)[:size].reshape(case.batch, case.columns) for _ in range(case.groups or 1)]
    tables = np.stack(tables)
    if case.tables == "aliased":
        return tables[:, :, np.arange(case.columns) // 2 * 2]
    if case.tables == "rubbish":
        return _spoil(rng, tables, [-1, INT_MIN, INT_MAX, num_blocks, num_blocks + 7, 0])
    return tables


def _random_ids(rng: np.random.Generator, case: Case) -> tuple[np.ndarray | None, ...]:
    """Source, destination, offset and temporal source of each row; no block is used by two rows."""
    num_blocks = max(layer.num_blocks for layer in case.layers if layer)
    ids = np.stack([rng.permutation(num_blocks)[: 3 * case.batch] for _ in range(case.groups or 1)])
    src, dst, temporal_src = np.split(ids, 3, axis=1)
    if case.tables == "aliased":
        src = np.where(rng.random(src.shape) < 0.6, dst, src)
        temporal_src = np.where(rng.random(src.shape) < 0.6, dst, temporal_src)
    if case.tables == "rubbish":
        bad = [-1, INT_MIN, INT_MAX, num_blocks]
        src, dst, temporal_src = (_spoil(rng, array, bad) for array in (src, dst, temporal_src))
    idle = _idle_rows(case)
    src[:, idle] = temporal_src[:, idle] = dst[:, idle]
    offsets = rng.integers(0, case.max_draft + 1, case.batch)
    offsets[idle] = 0
    if case.tables == "rubbish":
        offsets = _spoil(rng, offsets, [-1, INT_MIN, INT_MAX])
    src, dst, temporal_src = (
        (array if case.groups else array[0]).astype(np.int32) for array in (src, dst, temporal_src)
    )
    return (src, dst, offsets.astype(np.int32), temporal_src) if case.optional_ids else (src, dst)


def run(operation: str, implementation: str, states: Any, *arguments: Any, **options: Any) -> Any:
    """An operation on fresh device arrays, by the name of an entry of `IMPLEMENTATIONS`, or "oracle"."""
    function, reference = OPERATIONS[operation]
    config = options.pop("config", None)
    if implementation == "oracle":
        return reference(states, *arguments, **options)
    if options.get("idx_mapping") is not None:
        options["idx_mapping"] = jnp.array(options["idx_mapping"])
    operands = jax.tree.map(jnp.array, (states, *arguments))
    if implementation == "interpret":
        with unoptimized():
            return function(*operands, interpret=True, config=config or _DEFAULT_CONFIG, **options)
    return function(*operands, implementation=implementation, config=config, **options)


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Makes XLA compile fast rather than well: how it runs the interpreter's own program is no subject of tests."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def check_case(implementation: str, case: Case, layout: str) -> None:
    """Runs a case and compares every byte of every pool, and the vectors, with the oracle."""
    states = random_states(np.random.default_rng(case.seed), case.layers, layout)
    arguments, options = random_arguments(case)
    options["conv_layout"] = layout
    want = run(case.operation, "oracle", states, *arguments, **options)
    with wide_types(case.x64):
        got = run(case.operation, implementation, states, *arguments, config=case.config, **options)
        assert_same_bytes(got, want)


@contextlib.contextmanager
def wide_types(enabled: bool) -> Iterator[None]:
    """Allows 8-byte types in all threads: the interpreter's do not see what `jax.enable_x64` sets for this one."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


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


def changed_bytes(case: Case, layout: str) -> int:
    """How many bytes of the pools the oracle changes."""
    states = random_states(np.random.default_rng(case.seed), case.layers, layout)
    arguments, options = random_arguments(case)
    after = run(case.operation, "oracle", states, *arguments, conv_layout=layout, **options)
    after = after if case.operation == "copy" else after[0]
    pairs = zip(jax.tree.leaves(states), jax.tree.leaves(after), strict=True)
    return sum(int((as_bytes(a) != as_bytes(b)).sum()) for a, b in pairs)
