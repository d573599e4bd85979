"""Offsets beyond 2**31 elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts import MambaState
from pallas_kernels import PostprocessInputs, postprocess_mamba

_BLOCK = 2**20
_NUM_BLOCKS = 2**11 + 100


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_blocks_beyond_two_gib_of_elements_are_found(implementation: str) -> None:
    pool = jax.random.bits(jax.random.key(0), (_NUM_BLOCKS, _BLOCK), jnp.uint8).view(jnp.int8)
    last = _NUM_BLOCKS - 1
    # Two requests with 15 tokens certain and 16 per block: the boundary state lies one column further.
    ones = np.ones(2, np.int32)
    inputs = PostprocessInputs(
        mamba_state_idx=ones,
        num_accepted_tokens=2 * ones,
        num_computed_tokens=14 * ones,
        num_scheduled_tokens=2 * ones,
        num_draft_tokens=ones,
    )
    tables = np.array([[last, 3, last - 1], [5, 4, last - 2]], np.int32)
    want = pool.at[jnp.array([last, 5])].set(pool[jnp.array([last - 1, last - 2])])
    (state,), counter = postprocess_mamba(
        [MambaState(temporal=pool)],
        jax.tree.map(jnp.asarray, inputs),
        jnp.asarray(tables),
        block_size=16,
        conv_layout="DS",
        implementation=implementation,
    )
    assert bool(jnp.array_equal(state.temporal, want))
    assert counter.tolist() == [2, 2]
