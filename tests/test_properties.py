"""Bit patterns that a float move could change."""

import jax.numpy as jnp
import numpy as np
import pytest
from cases import IMPLEMENTATIONS, Case, Conv, Layer, Temporal, check_case, random_bits


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
