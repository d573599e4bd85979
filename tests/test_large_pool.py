"""Offsets and numbers beyond 2**31."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts import MambaState
from pallas_kernels import PostprocessInputs, copy_mamba_blocks, postprocess_mamba

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


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
def test_window_whose_tokens_squared_exceed_int32_shifts_in_place(implementation: str) -> None:
    num_tokens = 46342
    pool = np.random.default_rng(0).integers(0, 2**16, (3, num_tokens, 8), np.uint16)
    want = pool.copy()
    want[1, :-1] = pool[1, 1:]
    ids, offset = jnp.array([1], jnp.int32), jnp.array([1], jnp.int32)
    (state,) = copy_mamba_blocks(
        [MambaState(conv=jnp.asarray(pool))], ids, ids, offset, conv_layout="SD", implementation=implementation
    )
    assert np.array_equal(np.asarray(state.conv), want)


def test_states_of_more_tiles_than_can_be_numbered_are_refused() -> None:
    pool = jax.ShapeDtypeStruct((2**24, 2, 4), jnp.float32)
    ids = jax.ShapeDtypeStruct((1,), jnp.int32)
    step = functools.partial(copy_mamba_blocks, conv_layout="DS", implementation="mosaic_gpu")
    with pytest.raises(
        NotImplementedError, match="cut a request into 16777216 tiles, and the kernel numbers at most 16"
    ):
        jax.eval_shape(step, [MambaState(temporal=pool, stacked=True)], ids, ids)
