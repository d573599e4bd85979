"""The demo verifies, and says so when it cannot."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import demo, postprocess_mamba


@pytest.mark.parametrize("layout", ["DS", "SD"])
def test_demo_of_a_small_model_verifies(layout: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--model", "lfm2-1.2b", "--layout", layout, "--num-reqs", "5"]) == 0
    out, err = capfd.readouterr()
    assert "RACE DETECTED" not in out + err
    assert "verdict: OK, all" in out
    # Two of five requests copy, 8192 bytes in each of 10 layers.
    assert "bytes moved: 163840" in out


def test_demo_fails_when_a_byte_differs(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(states: Any, *args: Any, **options: Any) -> Any:
        states, counter = postprocess_mamba(states, *args, **options)
        return jax.tree.map(lambda leaf: leaf.at[3].multiply(2), states), counter + jnp.int32(0)

    monkeypatch.setattr(demo, "postprocess_mamba", broken)
    assert demo.main(["--model", "lfm2-1.2b"]) == 1
    assert "verdict: WRONG, 10 arrays differ from the oracle, the first is [0].conv" in capfd.readouterr().out


def test_unknown_model_is_refused_with_the_names(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main(["--model", "gpt"])
    assert stop.value.code == 2
    assert "qwen3.5-9b" in capfd.readouterr().err


def test_no_requests_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main(["--num-reqs", "0"])
    assert stop.value.code == 2
    assert "--num-reqs must be positive, got 0" in capfd.readouterr().err


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="A GPU runs the kernel.")
def test_kernel_on_a_cpu_is_refused_in_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main(["--implementation", "mosaic_gpu"])
    assert stop.value.code == 2
    assert "mosaic_gpu needs a GPU, and the first device here is cpu" in capfd.readouterr().err


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3.5-9b", "nemotron-3-super-120b-a12b"])
def test_demo_runs_the_kernel_on_a_gpu(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--model", name]) == 0
    assert "implementation: mosaic_gpu" in capfd.readouterr().out
