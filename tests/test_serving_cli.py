"""`python -m pallas_kernels.serving`: the demo checks itself, the report compares what it is asked to."""

import json
from pathlib import Path

import jax
import pytest

from pallas_kernels.serving import __main__ as serving
from pallas_kernels.serving import engine as engine_module

pytestmark = pytest.mark.xdist_group("serving_cli")

# As few tokens as show everything.
SMALL = ["--num-requests", "5", "--shared", "9", "--own", "2", "--output", "8"]


def test_demo_agrees_with_plain_decoding(capfd: pytest.CaptureFixture[str]) -> None:
    assert serving.main(SMALL) == 0
    out = capfd.readouterr().out
    assert "40 tokens in" in out
    assert "verdict: OK, all tokens are those of plain decoding" in out


def test_demo_fails_when_a_token_differs(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = engine_module.serve_step

    def wrong(*args: object, **options: object) -> object:
        states, slots, sampled, num_accepted = right(*args, **options)
        return states, slots, (sampled + 1) % 64, num_accepted

    monkeypatch.setattr(engine_module, "serve_step", wrong)
    assert serving.main(SMALL) == 1
    assert "verdict: WRONG, some tokens are not those of plain decoding" in capfd.readouterr().out


def test_report_compares_modes_and_writes_them_down(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    modes = ["fused copies", "no prefix cache"]
    assert serving.main([*SMALL, "--report", "--modes", *modes, "--json", str(file)]) == 0
    out = capfd.readouterr().out
    assert "fused copies / no prefix cache: " in out
    assert "verdict: OK" in out
    record = json.loads(file.read_text())
    assert [mode["mode"] for mode in record["modes"]] == modes
    assert [mode["hit_rate"] for mode in record["modes"]] == [4 * 8 / 55, 0]
    assert all(mode["accepted_length"] > 1.5 and mode["tokens_per_second"] > 0 for mode in record["modes"])
    costs = record["modes"][0]["copy_costs"]
    assert [cost["num_copies"] for cost in costs] == sorted({cost["num_copies"] for cost in costs})
    assert all(cost["copy_seconds"] > 0 < cost["step_seconds"] for cost in costs)
    assert record["right"] is True


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="A GPU runs the kernel.")
def test_kernel_on_a_cpu_is_refused_in_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        serving.main(["--implementation", "mosaic_gpu"])
    assert stop.value.code == 2
    assert "mosaic_gpu needs a GPU, and the first device here is cpu" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--tp", "1000"], "--tp must lie in 1.."), (["--batch", "0"], "--batch is too small: 0")],
    ids=["tp", "batch"],
)
def test_bad_option_is_refused_by_name(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serving.main(arguments)
    assert message in capfd.readouterr().err


@pytest.mark.gpu
def test_demo_runs_the_kernel_on_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    assert serving.main([]) == 0
    assert "implementation: mosaic_gpu" in capfd.readouterr().out
