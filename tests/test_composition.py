"""The operations inside larger programs: loops, branches, AOT, export, disabled jit, 64-bit mode, refs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CASES,
    IMPLEMENTATIONS,
    Case,
    Conv,
    Layer,
    Temporal,
    assert_same_bytes,
    random_arguments,
    random_states,
    run,
    wide_types,
)

from layouts import MambaState
from pallas_kernels import (
    PostprocessInputs,
    PreprocessInputs,
    aligned_state_indices,
    postprocess_mamba,
    preprocess_mamba,
)

_CASE = next(case for case in CASES if case.name == "small_pools")
_PORT_LAYERS = (Layer(Conv(2048, 2), Temporal((4, 64)), num_blocks=8),)
_HERE = ["xla", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]


def _step(case: Case = _CASE) -> tuple[Any, Any, dict[str, Any]]:
    states = random_states(np.random.default_rng(0), case.layers, "DS")
    arguments, options = random_arguments(case)
    return states, arguments, options | {"conv_layout": "DS"}


def _decode_step(states: Any, vectors: Any, tables: jax.Array, implementation: str | None) -> tuple[Any, Any]:
    """One align-mode step of three requests that schedule 3 tokens, 2 of them drafts, and accept 2."""
    idx, accepted, computed = vectors
    options = {"block_size": 3, "conv_layout": "DS", "implementation": implementation}
    starts = jnp.arange(4, dtype=jnp.int32) * 3
    states, idx, accepted = preprocess_mamba(
        states,
        PreprocessInputs(
            mamba_state_idx=idx, num_accepted_tokens=accepted, num_computed_tokens=computed, query_start_loc=starts
        ),
        tables,
        **options,
    )
    accepted = jnp.full_like(accepted, 2)
    states, accepted = postprocess_mamba(
        states,
        PostprocessInputs(
            mamba_state_idx=idx,
            num_accepted_tokens=accepted,
            num_computed_tokens=computed,
            num_scheduled_tokens=jnp.full_like(computed, 3),
            num_draft_tokens=jnp.full_like(computed, 2),
        ),
        tables,
        **options,
    )
    return states, (idx, accepted, computed + 2)


@pytest.mark.parametrize("implementation", _HERE)
def test_scan_over_steps_equals_steps_one_by_one(implementation: str) -> None:
    states = jax.tree.map(jnp.asarray, random_states(np.random.default_rng(0), _CASE.layers, "DS"))
    tables = jnp.arange(1, 37, dtype=jnp.int32).reshape(3, 12)
    vectors = (jnp.array([-1, 0, 1]), jnp.array([1, 1, 1]), jnp.array([0, 2, 4]))
    want = (jax.tree.map(jnp.array, states), vectors)
    for _ in range(6):
        want = _decode_step(*want, tables, "xla")

    @jax.jit
    def loop(carry: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (_decode_step(*carry, tables, implementation), None), carry, length=6)[0]

    assert_same_bytes(loop((states, vectors)), want)


@pytest.mark.parametrize("implementation", _HERE)
def test_cond_takes_the_branch(implementation: str) -> None:
    states, arguments, options = _step()
    want, _ = run("post", "oracle", states, *arguments, **options)

    @jax.jit
    def maybe(states: Any, arguments: Any, verified: jax.Array) -> Any:
        def post(states: Any) -> Any:
            return postprocess_mamba(states, *arguments, implementation=implementation, **options)[0]

        return jax.lax.cond(verified, post, lambda states: states, states)

    operands = jax.tree.map(jnp.asarray, (states, arguments))
    assert_same_bytes(maybe(*operands, True), want)
    assert_same_bytes(maybe(*operands, False), states)


@pytest.mark.parametrize("implementation", _HERE)
def test_ahead_of_time_compiled_step_runs(implementation: str) -> None:
    states, arguments, options = _step()
    want = run("post", "oracle", states, *arguments, **options)
    step = jax.jit(
        lambda states, *args: postprocess_mamba(states, *args, implementation=implementation, **options),
        donate_argnums=0,
    )
    operands = jax.tree.map(jnp.asarray, (states, *arguments))
    compiled = step.lower(*operands).compile()
    assert_same_bytes(compiled(*operands), want)


def test_exported_step_for_cuda_round_trips_on_any_machine() -> None:
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers, the extra `export`.")
    states, arguments, options = _step()
    step = jax.jit(lambda states, *args: postprocess_mamba(states, *args, implementation="mosaic_gpu", **options))
    exported = jax.export.export(step, platforms=["cuda"])(states, *arguments)
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    assert again.in_avals == exported.in_avals
    assert again.mlir_module().count("custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
def test_exported_step_runs_on_a_gpu() -> None:
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers, the extra `export`.")
    states, arguments, options = _step()
    want = run("post", "oracle", states, *arguments, **options)
    step = jax.jit(lambda states, *args: postprocess_mamba(states, *args, implementation="mosaic_gpu", **options))
    exported = jax.export.export(step, platforms=["cuda"])(states, *arguments)
    again = jax.export.deserialize(exported.serialize())
    assert_same_bytes(again.call(*jax.tree.map(jnp.asarray, (states, *arguments))), want)


@pytest.mark.parametrize("implementation", _HERE)
@pytest.mark.parametrize("name", ["small_pools", "pre", "copy", "mapped"])
def test_steps_run_without_jit(implementation: str, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    states, arguments, options = _step(case)
    want = run(case.operation, "oracle", states, *arguments, **options)
    with jax.disable_jit():
        got = run(case.operation, implementation, states, *arguments, **options)
    assert_same_bytes(got, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["padded_batch", "copy", "mapped", "pre_mapped"])
def test_steps_run_in_64_bit_mode(implementation: str, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    states, arguments, options = _step(case)
    want = run(case.operation, "oracle", states, *arguments, **options)
    with wide_types(True):
        counts = {key: value for key, value in options.items() if key.startswith("num_") and value}
        for integer in (np.int64, np.uint8, int) if counts else (int,):
            counts = {key: integer(value) for key, value in counts.items()}
            assert_same_bytes(run(case.operation, implementation, states, *arguments, **options | counts), want)


def test_refs_are_updated_under_an_outer_jit() -> None:
    states, arguments, options = _step()
    want, _ = run("post", "oracle", states, *arguments, **options)
    refs = jax.tree.map(lambda leaf: jax.new_ref(jnp.asarray(leaf)), states)

    @jax.jit
    def step(refs: Any, arguments: Any) -> jax.Array:
        return postprocess_mamba(refs, *arguments, implementation="xla", **options)[1]

    step(refs, jax.tree.map(jnp.asarray, arguments))
    assert_same_bytes(jax.tree.map(lambda ref: ref[...], refs), want)


def test_shapes_are_known_without_running() -> None:
    states, arguments, options = _step()
    out = jax.eval_shape(lambda *args: postprocess_mamba(*args, **options), states, *arguments)
    assert jax.tree.map(jnp.shape, out) == (jax.tree.map(np.shape, states), (6,))


# A published port's cases: state width 2, dim 2048, blocks of 16 tokens, one token a request.
@pytest.mark.xdist_group("published_port")
@pytest.mark.parametrize("implementation", ["oracle", *IMPLEMENTATIONS])
@pytest.mark.parametrize(
    ("computed", "idx", "accepted", "new_idx", "new_accepted", "conv", "temporal"),
    [
        pytest.param(16, -1, 1, 1, 1, None, None, id="fresh_request"),
        pytest.param(17, 1, 1, 1, 1, None, None, id="same_block"),
        pytest.param(32, 1, 1, 2, 1, (1, 0), 1, id="boundary_cross"),
        pytest.param(32, 1, 2, 2, 1, (1, 1), 2, id="cross_with_bias"),
    ],
)
def test_preprocess_moves_as_a_published_port_does(
    implementation: str,
    computed: int,
    idx: int,
    accepted: int,
    new_idx: int,
    new_accepted: int,
    conv: tuple[int, int] | None,
    temporal: int | None,
) -> None:
    pools = random_states(np.random.default_rng(0), _PORT_LAYERS, "DS")
    table = np.array([[5, 3, 7, 2]], np.int32)
    states, state_idx, counter = run(
        "pre",
        implementation,
        pools,
        PreprocessInputs(
            mamba_state_idx=np.array([idx], np.int32),
            num_accepted_tokens=np.array([accepted], np.int32),
            num_computed_tokens=np.array([computed], np.int32),
            query_start_loc=np.array([0, 1], np.int32),
        ),
        table,
        block_size=16,
        conv_layout="DS",
    )
    want = jax.tree.map(np.array, pools)
    dst = table[0, new_idx]
    if conv is not None:
        column, offset = conv
        want[0].conv[dst, :, : 2 - offset] = pools[0].conv[table[0, column], :, offset:]
        # The cross with bias reads the column of its own destination: a copy onto itself.
        want[0].temporal[dst] = pools[0].temporal[table[0, temporal]]
    assert_same_bytes(states, want)
    assert (int(state_idx[0]), int(counter[0])) == (new_idx, new_accepted)


def test_preprocess_does_not_advance_a_slot_without_a_row() -> None:
    ones = np.ones(4, np.int32)
    _, state_idx, _ = run(
        "pre",
        "xla",
        [],
        PreprocessInputs(
            mamba_state_idx=ones,
            num_accepted_tokens=ones,
            num_computed_tokens=32 * ones,
            query_start_loc=np.arange(5, dtype=np.int32),
        ),
        np.zeros((4, 4), np.int32),
        block_size=16,
        conv_layout="DS",
        idx_mapping=np.array([0, -1, 2, 3], np.int32),
    )
    assert state_idx.tolist() == [2, 1, 2, 2]


@pytest.mark.parametrize(
    ("seq_lens", "null_block_id", "want"),
    [
        ([0, 1, 16], 0, [[10, 11], [20, 21], [30, 31]]),
        ([17, 33, 48], 0, [[11, 12], [22, 0], [32, 0]]),
        ([64, -5, 2**31 - 1], 9, [[9, 9], [20, 21], [9, 9]]),
        ([64, 0, 0], None, [[0, 0], [20, 21], [30, 31]]),
        ([64, 0, 33], -1, [[-1, -1], [20, 21], [32, -1]]),
    ],
)
def test_aligned_state_indices_start_at_the_running_column(
    seq_lens: list[int], null_block_id: int | None, want: list[list[int]]
) -> None:
    tables = jnp.array([[10, 11, 12], [20, 21, 22], [30, 31, 32]])
    lens = jnp.array(seq_lens, jnp.int32)
    options = {"block_size": 16, "num_state_slots": 2, "null_block_id": null_block_id}
    assert aligned_state_indices(tables, lens, **options).tolist() == want
    grouped = jax.jit(lambda tables: aligned_state_indices(tables, lens, **options))(jnp.stack([tables, tables]))
    assert grouped.tolist() == [want, want]


def test_numpy_leaves_are_taken_and_left_alone() -> None:
    states, arguments, options = _step()
    before = jax.tree.map(np.array, states)
    want = run("post", "oracle", states, *arguments, **options)
    assert_same_bytes(postprocess_mamba(states, *arguments, implementation="xla", **options), want)
    assert_same_bytes(states, before)


def test_states_may_be_any_pytree() -> None:
    pool = jnp.arange(40 * 16.0).reshape(40, 16)
    arguments, options = random_arguments(_CASE)
    states = {"layers": (MambaState(temporal=pool + 1), None), "head": MambaState(temporal=pool + 2)}
    want = run("post", "oracle", states, *arguments, conv_layout="DS", **options)
    assert_same_bytes(run("post", "xla", states, *arguments, conv_layout="DS", **options), want)
