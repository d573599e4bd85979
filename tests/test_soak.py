"""Many steps, and one step many times. `make soak` runs a hundred thousand steps."""

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soak
from cases import CASES, OPERATIONS, as_bytes, random_arguments, random_states, run

_HERE = ["xla", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("implementation", _HERE)
def test_every_step_of_an_engine_is_as_the_oracle_says(implementation: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--steps", str(soak.CHUNK), "--implementation", implementation]) == 0
    assert f"step {soak.CHUNK} of {soak.CHUNK}: every checksum agrees" in capfd.readouterr().out


def test_soak_names_the_step_that_goes_wrong(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def wrong_once(states: Any, *arguments: Any, **options: Any) -> Any:
        states, counter = soak_reference(states, *arguments, **options)
        calls.append(None)
        if len(calls) == 38:
            as_bytes(states[1].temporal)[77] ^= 1
        return states, counter

    soak_reference = soak.postprocess_mamba_ref
    monkeypatch.setattr(soak, "postprocess_mamba_ref", wrong_once)
    assert soak.main(["--steps", "100", "--seed", "3"]) == 1
    assert "WRONG: step 37 differs from the oracle; run again with --seed 3 --steps 38" in capfd.readouterr().out


_MATMULS = """
import jax, jax.numpy as jnp
step = jax.jit(lambda x: x @ x / 4096)
x = jnp.ones((4096, 4096), jnp.bfloat16)
while True:
    x = step(x).block_until_ready()
    print("running", flush=True)
"""


@pytest.fixture
def other_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Matrix products of another process on the same GPU, where asked for."""
    if not request.param:
        yield
        return
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-c", _MATMULS]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "running\n"
        yield
        assert process.poll() is None, "the other process ended before the test did"
        process.kill()


@pytest.mark.parametrize(
    ("implementation", "other_kernels"),
    [
        pytest.param("xla", False, id="xla"),
        pytest.param("mosaic_gpu", False, id="mosaic_gpu", marks=pytest.mark.gpu),
        pytest.param("mosaic_gpu", True, id="mosaic_gpu-beside_other_kernels", marks=pytest.mark.gpu),
    ],
    indirect=["other_kernels"],
)
@pytest.mark.parametrize("name", ["small_pools", "mapped", "pre", "copy"])
def test_same_inputs_give_the_same_bytes_a_thousand_times(implementation: str, other_kernels: None, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    states = random_states(np.random.default_rng(0), case.layers, "DS")
    arguments, options = random_arguments(case)
    first = run(case.operation, implementation, states, *arguments, conv_layout="DS", **options)
    operation = functools.partial(OPERATIONS[case.operation][0], implementation=implementation, conv_layout="DS")

    def bits(leaf: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"u{leaf.dtype.itemsize}"))

    @jax.jit
    def same(states: Any, arguments: Any, first: Any) -> jax.Array:
        again = operation(states, *arguments, **options)
        pairs = zip(jax.tree.leaves(again), jax.tree.leaves(first), strict=True)
        return jnp.stack([(bits(a) == bits(b)).all() for a, b in pairs]).all()

    operands = jax.tree.map(jnp.asarray, (states, arguments, first))
    assert all(jax.device_get([same(*operands) for _ in range(1000)]))
