"""The benchmark verifies what it times, says what it lacks, and judges, records and draws what it measured."""

import dataclasses
import inspect
import json
import re
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from layouts import model
from pallas_kernels.bench import __main__ as bench
from pallas_kernels.bench import bars, contenders, measure
from pallas_kernels.bench.first_call import FirstCall
from pallas_kernels.bench.report import Reporter
from pallas_kernels.bench.vllm import MODULE, POSTPROCESS, VllmUnavailableError, load_kernels
from pallas_kernels.bench.workload import Workload

on_cpu = pytest.mark.skipif(jax.default_backend() == "gpu", reason="A GPU runs the kernel.")

# Our own stand-in for vLLM's file: only what the loader looks for.
KERNELS = f"""
import vllm_is_not_installed

_TEMPORAL_TILES = 16
computed = vllm_is_not_installed.value()

@triton.jit
def helper(x):
    return tl.load(x) + _TEMPORAL_TILES

@triton.jit(do_not_specialize=["n"])
def {POSTPROCESS}(x, n):
    return helper(x)

def host(x):
    return {POSTPROCESS}[(1,)](x)
"""


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty packages in place of Triton and torch."""

    def jit(function: Any = None, **options: Any) -> Any:
        return function or (lambda function: function)

    language = types.ModuleType("triton.language")
    triton = types.ModuleType("triton")
    vars(triton).update(jit=jit, language=language)
    for module in (triton, language, types.ModuleType("torch")):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.usefixtures("stand_ins")
def test_only_the_jitted_functions_of_a_file_are_loaded(tmp_path: Path) -> None:
    file = write(tmp_path / "mamba_utils.py", KERNELS)
    kernels = load_kernels(file)
    assert sorted(kernels.functions) == ["helper", POSTPROCESS]
    assert (kernels.num_tiles, kernels.operations) == (16, ("post",))
    assert re.fullmatch(r"of a file with SHA-256 [0-9a-f]{12}", kernels.version)
    # Triton compiles what `inspect` shows it.
    assert inspect.getsource(kernels.functions["helper"]).startswith("@triton.jit\ndef helper(x):")


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("kind", ["site", "package", "wheel"])
def test_a_package_and_a_wheel_tell_their_version(kind: str, tmp_path: Path) -> None:
    if kind == "wheel":
        path = tmp_path / "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(MODULE, KERNELS)
    else:
        write(tmp_path / MODULE, KERNELS)
        write(tmp_path / "vllm-0.33.0.dist-info" / "METADATA", "")
        path = tmp_path if kind == "site" else tmp_path / "vllm"
    kernels = load_kernels(path)
    assert kernels.version == "0.33.0"
    assert POSTPROCESS in inspect.getsource(kernels.functions[POSTPROCESS])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "mamba_utils.py does not exist: --vllm wants vLLM's package folder, wheel or"),
        ("", f"has no @triton.jit function {POSTPROCESS}; vLLM 0.33 has it"),
        (KERNELS.replace("@triton", "@other"), f"has no @triton.jit function {POSTPROCESS}"),
        (KERNELS.replace("_TEMPORAL_TILES = 16", "TILES = 16"), "does not set _TEMPORAL_TILES"),
        (KERNELS.replace("return helper(x)", "return elsewhere(x)"), "use elsewhere from other files of vLLM"),
    ],
)
def test_a_file_that_is_not_vllms_is_refused_with_the_reason(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mamba_utils.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(VllmUnavailableError) as error:
        load_kernels(file)
    assert message in str(error.value)


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VllmUnavailableError, match=r"has no vllm/v1/worker/mamba_utils\.py: it is no vLLM package"):
        load_kernels(tmp_path)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("package", ["triton", "torch"])
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(VllmUnavailableError, match=f"vLLM's kernels need {package}, which does not import here"):
        load_kernels(write(tmp_path / "mamba_utils.py", KERNELS))


@on_cpu
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contenders", "mosaic_gpu"], "mosaic_gpu needs a GPU, and the first device here is cpu"),
        (["--contenders", "vllm"], "the contender vllm needs --vllm PATH"),
        (["--vllm", "x.py"], "--vllm needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1)"),
        (["--num-reqs", "4", "--copying", "5"], "--copying must lie in 0..--num-reqs = 4, got [5]"),
        (["--offsets", "9"], "--offsets must lie in 0..4 for qwen3.5-9b, got 9"),
        (["--iterations", "1"], "a median needs at least 2"),
        (["--json", "/no/such/folder/out.json"], "the folder of /no/such/folder/out.json does not exist"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    options: list[str], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit) as stop:
        bench.main(options)
    assert stop.value.code == 2
    assert message in capfd.readouterr().err


@on_cpu
@pytest.mark.parametrize("operation", ["post", "pre", "copy"])
def test_what_is_asked_for_is_verified_and_timed(
    operation: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    arguments = ["--models", "lfm2-1.2b", "--operation", operation, "--num-reqs", "4", "--copying", "0", "2"]
    options = ["--contenders", "xla", "idiom", "empty", "limit", "--iterations", "2", "--json", str(file)]
    assert bench.main([*arguments, *options]) == 0
    record = json.loads(file.read_text())
    rows = record["rows"]
    ours = [(copying, contender) for copying in (0, 2) for contender in ("empty", "xla", "idiom")]
    assert [(row["copying"], row["contender"]) for row in rows] == [(2, "limit"), *ours]
    # Ten layers of 8192-byte windows of two tokens: source and destination read, destination written.
    assert {row["copying"]: row["bytes"] for row in rows} == {0: 0, 2: 2 * 10 * 3 * 8192}
    assert all(row["seconds"] > 0 and row["conv_only"] for row in rows)
    assert (record["jax"], record["method"], record["driver"]) == (jax.__version__, "wall time, median", None)
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 2 + len(rows)
    assert [line.split()[7] for line in lines[2:]] == [row["contender"] for row in rows]


@on_cpu
def test_a_wrong_result_is_not_timed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "_idiom", lambda *operands: [jax.numpy.int32(0)])
    contenders._make_step.cache_clear()
    assert bench.main(["--models", "lfm2-1.2b", "--num-reqs", "4", "--copying", "2", "--contenders", "idiom"]) == 1
    contenders._make_step.cache_clear()
    assert "idiom gives a WRONG result on Workload" in capfd.readouterr().out


@pytest.mark.parametrize("operation", ["post", "pre", "copy"])
def test_published_protocol_copies_each_even_block_to_the_next(operation: str) -> None:
    workload = Workload(model("lfm2-1.2b"), "DS", 1, operation, 3, 3, 0, paired=True)
    assert workload.num_blocks == 6
    reference = contenders.OPERATIONS[operation][1]
    states = jax.tree.map(np.array, workload.states(num_layers=1))
    arguments = jax.tree.map(np.array, workload.arguments())
    moved = reference(states, *arguments, **workload.static_options)
    after = (moved if operation == "copy" else moved[0])[0].conv.view(np.uint16)
    assert np.array_equal(after, states[0].conv.view(np.uint16)[[0, 0, 2, 2, 4, 4]])


def test_no_copy_step_of_48_pools_costs_little_more_than_an_empty_call() -> None:
    """The XLA path, on a CPU. The bar is a factor of 3; a busy machine gets as much again."""
    workload = Workload(dataclasses.replace(model("lfm2-1.2b"), num_layers=48, conv_dim=64), "DS", 1, "post", 128, 0, 0)
    rows = measure.Bench(Reporter(), iterations=40).measure([workload], ["empty", "xla"])
    seconds = {row.contender: row.seconds for row in rows}
    assert seconds["xla"] < 6 * seconds["empty"]


@on_cpu
def test_first_calls_are_timed_for_separate_and_stacked_layers(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    arguments = ["--first-call", "--models", "lfm2-1.2b", "--contenders", "xla", "--num-reqs", "2", "--copying", "0"]
    assert bench.main([*arguments, "--layers", "2", "--json", str(file)]) == 0
    calls = json.loads(file.read_text())["first_calls"]
    assert [(call["num_layers"], call["stacked"]) for call in calls] == [(2, False), (2, True)]
    assert all(call[f"{part}_seconds"] > 0 for call in calls for part in ("trace", "lower", "compile"))
    assert "first call of xla, 2 layers, separate arrays: " in capfd.readouterr().out


def row(contender: str, microseconds: float, **changes: Any) -> measure.Row:
    """A measurement that was not made."""
    usual: dict[str, Any] = {
        "model": "m",
        "conv_only": False,
        "layout": "DS",
        "tp": 1,
        "operation": "post",
        "num_reqs": 128,
        "copying": 8,
        "offset": 1,
        "paired": False,
        "num_ctas": None,
        "wall_seconds": None,
        "bytes": 300 * 2**20,
        "kernels": 1,
    }
    return measure.Row(**usual | changes, contender=contender, seconds=microseconds * 1e-6)


def judged(rows: list[measure.Row], calls: list[FirstCall] | None = None) -> dict[str, tuple[str | None, bool | None]]:
    return {bar.name: (bar.measured, bar.met) for bar in bars.judge(rows, calls or [])}


def test_bars_are_open_without_measurements() -> None:
    assert set(judged([]).values()) == {(None, None)}


def test_bars_take_the_worst_measurement_of_the_same_workload() -> None:
    rows = [row("vllm", 126), row("limit", 94), row("mosaic_gpu", 100)]
    rows += [row("vllm", 124, offset=2), row("limit", 92, offset=2), row("mosaic_gpu", 100, offset=2)]
    rows += [row("vllm", 1, layout="SD"), row("limit", 1, layout="SD")]  # nothing of ours to compare with
    got = judged(rows)
    assert got["m DS, 8 or more copy, vLLM's time over ours"] == ("1.24x", False)
    assert got["m DS, 256 MiB or more, share of the limit"] == ("92.0%", False)
    assert got["any batch, vLLM's time over ours"] == ("1.24x", True)
    assert got["m DS, 1 of 128 copies, vLLM's time over ours"] == (None, None)
    (bar,) = (bar for bar in bars.judge(rows, []) if "256 MiB" in bar.name)
    assert (bar.where, bar.missed) == ("m DS, 8 of 128 copy, offset 2", (1, 2))
    assert judged(rows[:3])["m DS, 8 or more copy, vLLM's time over ours"] == ("1.26x", True)


def test_bars_of_idle_batches_and_of_few_thread_blocks() -> None:
    idle = {"copying": 0, "bytes": 0}
    rows = [row("vllm", 40, **idle), row("mosaic_gpu", 2, **idle), row("mosaic_gpu", 2.1, num_reqs=512, **idle)]
    rows += [row("mosaic_gpu", 100), row("mosaic_gpu", 170, num_ctas=bars.FEW_CTAS)]
    got = judged(rows)
    assert got["no request copies"] == ("2.10 us", False)
    assert got["no request of 128 copies, vLLM's time over ours"] == ("20.00x", True)
    assert got["32 thread blocks, share of full speed"] == ("58.8%", False)


def test_bars_of_conv_only_models_start_at_64_mib() -> None:
    small = {"conv_only": True, "bytes": 63 * 2**20}
    large = {"conv_only": True, "bytes": 64 * 2**20, "offset": 0}
    rows = [row("limit", 10, **small), row("mosaic_gpu", 100, **small)]
    assert judged(rows)["conv only, 64 MiB or more, share of the limit"] == (None, None)
    rows += [row("limit", 80, **large), row("mosaic_gpu", 100, **large)]
    assert judged(rows)["conv only, 64 MiB or more, share of the limit"] == ("80.0%", True)


def test_bars_of_the_first_call() -> None:
    def call(layers: int, seconds: float, stacked: bool = False) -> FirstCall:
        return FirstCall("m", layers, stacked, "mosaic_gpu", seconds / 4, seconds / 4, seconds / 2)

    got = judged([], [call(12, 1), call(24, 2), call(48, 5), call(48, 3.5, stacked=True)])
    assert got["first call, 48 layers of separate arrays"] == ("5.00 s", True)
    assert got["first call, growth with twice the layers"] == ("2.50x", False)
    assert got["first call, stacked"] == ("3.50 s", False)


def test_bars_of_the_xla_path_hold_for_both_clocks() -> None:
    idle = {"copying": 0, "bytes": 0}
    rows = [row("idiom", 1000, wall_seconds=0.9e-3, **idle), row("xla", 100, wall_seconds=0.1e-3, **idle)]
    rows += [row("empty", 30, **idle), row("idiom", 100, copying=32), row("xla", 99, copying=32)]
    rows += [row("idiom", 100, copying=33), row("xla", 200, copying=33)]  # more than a quarter
    got = judged(rows)
    assert got["XLA, no request copies, the idiom's time over ours"] == ("10.00x", True)
    assert got["XLA, no request copies, the idiom's wall time over ours"] == ("9.00x", False)
    assert got["XLA, up to a quarter copy, the idiom's time over ours"] == ("1.01x", True)
    assert got["XLA, no request copies, our time over an empty call's"] == ("3.33x", False)


def test_bar_table_says_what_was_missed() -> None:
    lines = list(bars.bar_table(bars.judge([row("mosaic_gpu", 3, copying=0, bytes=0)], [])))
    assert lines[1].split("  ")[0] == "no request copies"
    assert "<= 2.00 us" in lines[1]
    assert lines[1].split("3.00 us")[1].split() == ["MISSED", "1", "of", "1", "m", "DS,", "128", "requests"]
    assert "not measured" in lines[2]


def test_fixed_costs_are_what_a_launch_takes_and_what_does_not_grow_with_the_copies() -> None:
    idle = {"copying": 0, "bytes": 0}
    rows = [row("mosaic_gpu", 1.9, **idle), row("mosaic_gpu", 1.25, num_ctas=bars.ALONE.num_ctas, **idle)]
    rows += [row("mosaic_gpu", 14, copying=1), row("limit", 10.5, copying=1), row("mosaic_gpu", 84), row("limit", 77)]
    # Of these there is only one.
    rows += [row("mosaic_gpu", 9, copying=1, offset=2), row("mosaic_gpu", 99, layout="SD")]
    assert list(bars.fixed_costs(rows)) == [
        "m DS, 128 requests: a launch takes 1.25 us with one warpgroup in all, "
        "1.90 us with the grid that copies fastest",
        "m DS, offset 1: a step takes 4.0 us (the limit 1.0 us), and 10.00 us more for each request that copies, "
        "which is 95.0% of the limit's speed",
    ]
    assert judged(rows)["no request copies"] == ("1.90 us", True)


@pytest.mark.parametrize("option", ["--num-ctas", "--few-num-ctas"])
def test_bars_refuse_the_grid_of_the_smallest_launch(option: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bars.main([option, "1"])
    assert "one thread block is what the smallest launch is measured with" in capfd.readouterr().err


def test_a_bar_that_asks_for_more_than_the_memory_gives_is_out_of_reach() -> None:
    rows = [row("vllm", 120), row("mosaic_gpu", 105), row("limit", 100)]  # At the limit it were 1.20x.
    rows += [row("vllm", 130, copying=32), row("mosaic_gpu", 110, copying=32), row("limit", 100, copying=32)]
    (bar,) = (bar for bar in bars.judge(rows, []) if "8 or more" in bar.name)
    assert (bar.measured, bar.missed, bar.out_of_reach) == ("1.14x", (2, 2), 1)


def test_an_earlier_record_is_judged_again_without_measuring(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content = {"rows": [dataclasses.asdict(row("mosaic_gpu", 3, copying=0, bytes=0))], "first_calls": []}
    (tmp_path / "old.json").write_text(json.dumps(content | {"few_ctas": {"num_ctas": 32}, "device": "card"}))
    assert bars.main(["--judge", str(tmp_path / "old.json"), "--json", str(tmp_path / "new.json")]) == 0
    assert "3.00 us" in capfd.readouterr().out
    judged_again = json.loads((tmp_path / "new.json").read_text())
    assert judged_again["device"] == "card"
    assert judged_again["bars"][0]["missed"] == [1, 1]


def test_a_record_is_drawn_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="Drawing needs matplotlib, the extra 'plot'.")
    from pallas_kernels.bench import plot

    rows = [row(name, 100, copying=n, bytes=n * 2**20) for name in ("vllm", "mosaic_gpu", "limit") for n in (1, 8)]
    rows += [row("mosaic_gpu", 90, layout="SD"), row("mosaic_gpu", 2, copying=0, bytes=0)]
    where = {"device": "a card", "jax": "1", "date": "2026-01-01", "method": "by hand"}
    (tmp_path / "in.json").write_text(json.dumps(where | {"rows": [dataclasses.asdict(r) for r in rows]}))
    assert plot.main([str(tmp_path / "in.json"), str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    drawn = plot.figure(json.loads((tmp_path / "in.json").read_text()))
    times, speed = drawn.axes
    assert times.get_ylabel() == "time of a step (µs)"
    assert speed.get_xlabel() == "bytes read plus bytes written (MiB)"
    assert [line.get_label() for line in speed.lines] == [
        "Mosaic GPU kernel (ours)",
        "vLLM's Triton kernel",
        "memory limit (elementwise copy)",
    ]
    assert list(speed.lines[0].get_xdata()) == [1, 8]
    with pytest.raises(ValueError, match="nothing to draw"):
        plot.figure(where | {"rows": []})
