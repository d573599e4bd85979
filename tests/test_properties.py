"""Random shapes, types and values against the oracle."""

import math

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from cases import IMPLEMENTATIONS, Case, Conv, Layer, Temporal, check_case, random_bits
from hypothesis import strategies as st

from pallas_kernels import KernelConfig

_SETTINGS = hypothesis.settings(deadline=None, derandomize=True, database=None, max_examples=40)

_NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int4", "uint4")
_DTYPES = [np.dtype(getattr(jnp, name)) for name in _NARROW]
_DTYPES += [np.dtype(name) for name in ("float16", "float32", "int8", "uint16", "int32", "bool", "complex64")]
_KERNEL_DTYPES = [
    dtype for dtype in _DTYPES if dtype.name not in ("float4_e2m1fn", "int4", "uint4", "bool", "complex64")
]


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
        st.lists(st.integers(1, 5), max_size=4),
        st.sampled_from(dtypes),
    )
    return st.builds(
        Layer,
        conv=st.none() | conv,
        temporal=st.none() | temporal,
        num_blocks=st.integers(1, 40),
        num_layers=st.none() | st.integers(1, 2),
        group=st.integers(0, 1),
    )


def _case(dtypes: list[np.dtype], multiple_of: int) -> st.SearchStrategy[Case]:
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


@pytest.mark.parametrize("layout", ["DS", "SD"])
@_SETTINGS
@hypothesis.given(case=_case(_DTYPES, 1))
def test_xla_agrees_with_the_oracle_on_any_step(layout: str, case: Case) -> None:
    check_case("xla", case, layout)


@pytest.mark.parametrize("layout", ["DS", "SD"])
@hypothesis.settings(_SETTINGS, max_examples=12)
@hypothesis.given(case=_case(_KERNEL_DTYPES, 16))
def test_interpreted_kernel_agrees_with_the_oracle_on_any_step(layout: str, case: Case) -> None:
    check_case("interpret", case, layout)


def test_random_bits_hold_nan_patterns() -> None:
    pool = random_bits(np.random.default_rng(0), (1000,), np.dtype(jnp.bfloat16))
    assert np.isnan(pool.astype(np.float32)).sum() > 1


_FLOATS = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", ["DS", "SD"])
def test_every_float_pattern_survives(implementation: str, layout: str) -> None:
    dtypes = [np.dtype(getattr(jnp, name)) for name in _FLOATS]
    layers = tuple(Layer(Conv(512, 4, dtype), Temporal((2048,), dtype), num_blocks=36) for dtype in dtypes)
    check_case(implementation, Case("patterns", layers, seed=7), layout)
