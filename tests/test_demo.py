"""The demo verifies, and says so when it cannot."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import demo, postprocess_mamba
from pallas_kernels.bench import __main__ as bench


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


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="A GPU runs the kernel.")
@pytest.mark.parametrize("command", ["demo", "bench"])
def test_kernel_on_a_cpu_is_refused_in_a_sentence(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    main, option = (demo.main, "--implementation") if command == "demo" else (bench.main, "--contenders")
    with pytest.raises(SystemExit) as stop:
        main([option, "mosaic_gpu"])
    assert stop.value.code == 2
    assert "mosaic_gpu needs a GPU, and the first device here is cpu" in capfd.readouterr().err


@pytest.mark.parametrize("operation", ["post", "pre", "copy"])
def test_bench_verifies_and_times_what_it_is_asked_to(
    operation: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    arguments = ["--models", "lfm2-1.2b", "--operation", operation, "--num-reqs", "4", "--copying", "0", "2"]
    contenders = ["--contenders", "xla", "idiom", "limit", "--iterations", "2", "--json", str(file)]
    assert bench.main([*arguments, *contenders]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["copying"], row["contender"]) for row in rows] == [
        (copying, contender) for copying in (0, 2) for contender in ("limit", "xla", "idiom")
    ]
    # Ten layers of 8192-byte windows of two tokens: source and destination read, destination written.
    assert [row["bytes"] for row in rows] == [0] * 3 + [2 * 10 * 3 * 8192] * 3
    assert all(row["seconds"] > 0 for row in rows)


def test_bench_refuses_more_copies_than_requests(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--num-reqs", "4", "--copying", "5"])
    assert "--copying must lie in 0..--num-reqs = 4, got [5]" in capfd.readouterr().err


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3.5-9b", "nemotron-3-super-120b-a12b"])
def test_demo_runs_the_kernel_on_a_gpu(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--model", name]) == 0
    assert "implementation: mosaic_gpu" in capfd.readouterr().out
