"""The notebooks run from top to bottom, are kept clean, and their figures are those that they draw now."""

import dataclasses
import json
import os
import re
import runpy
from pathlib import Path

import nbformat
import pytest
from matplotlib.figure import Figure
from nbclient import NotebookClient

import pallas_kernels
from layouts import model
from pallas_kernels.bench.bars import judge
from pallas_kernels.bench.first_call import FirstCall
from pallas_kernels.bench.measure import Row
from pallas_kernels.bench.workload import Workload
from pallas_kernels.pictures import FOLDER_VARIABLE, fingerprint, keep, kept_fingerprint

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
clean = runpy.run_path(str(FOLDER / "clean.py"))["clean"]


def execute(notebook: Path, figures: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a notebook on the package that the tests import, fails where it fails, and returns what it printed."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(figures))
    paths = [str(Path(pallas_kernels.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    # What it must not do here.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    executed = nbformat.read(notebook, as_version=4)
    NotebookClient(executed, timeout=120, resources={"metadata": {"path": str(FOLDER)}}).execute()
    outputs = [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(shown) == len(list(figures.glob("*.png"))), "a figure is kept and not shown, or shown and not kept"
    return "".join(output.text for output in outputs if output.output_type == "stream")


def assert_current(drawn: Path) -> None:
    """Figures that a run has drawn are the kept ones."""
    for file in drawn.glob("*.png"):
        kept = FOLDER / "figures" / file.name
        assert kept.exists(), f"{file.name} is missing: run `make figures`"
        assert kept_fingerprint(kept) == kept_fingerprint(file), f"{file.name} is not what is drawn now: `make figures`"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebook_is_kept_clean_with_the_install_cell_of_all(notebook: Path) -> None:
    text = notebook.read_text()
    assert text == clean(text), "run `python notebooks/clean.py`"
    nbformat.validate(nbformat.reads(text, as_version=4))


def test_cleaning_removes_outputs_counts_and_metadata_and_renews_the_install_cell() -> None:
    install, code = nbformat.v4.new_code_cell("%pip install this"), nbformat.v4.new_code_cell("print(1)")
    code.outputs, code.execution_count = [nbformat.v4.new_output("stream", text="1\n")], 7
    code.metadata = {"collapsed": True}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("Title"), install, code])
    cleaned = nbformat.reads(clean(nbformat.writes(notebook)), as_version=4)
    title, install, code = cleaned.cells
    assert title.source == "Title"
    assert install.source == (FOLDER / "install.py").read_text().rstrip()
    assert (code.source, code.outputs, code.execution_count, code.metadata) == ("print(1)", [], None, {})


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebook_installs_first_and_names_the_gpus(notebook: Path) -> None:
    title, install, *_ = nbformat.read(notebook, as_version=4).cells
    assert (title.cell_type, install.cell_type) == ("markdown", "code")
    assert "compute capability 9.0 or later" in title.source
    assert "T4, L4 and A100" in title.source


def test_every_kept_figure_is_drawn_by_a_notebook() -> None:
    code = "".join(notebook.read_text() for notebook in NOTEBOOKS)
    names = {file.stem for file in (FOLDER / "data").glob("*.json")}
    drawn = set()
    for name in re.findall(r'keep\(\w+, f?\\"([^"]+)\\"\)', code):
        drawn |= {name.replace("{name}", record) for record in names} if "{name}" in name else {name}
    assert {file.stem for file in (FOLDER / "figures").glob("*.png")} == drawn


def _figure(**changes: object) -> Figure:
    look = {"heights": [1.0, 2.0], "color": "#0072B2", "title": "speed", "label": "limit"} | changes
    figure = Figure(figsize=(4, 3))
    axes = figure.subplots()
    axes.bar([0, 1], look["heights"], color=look["color"])
    axes.axhline(1.5, label=look["label"])
    axes.set_title(look["title"])
    axes.legend()
    return figure


@pytest.mark.parametrize(
    "change", [{"heights": [1.0, 2.1]}, {"color": "#D55E00"}, {"title": "time"}, {"label": "bound"}], ids=str
)
def test_fingerprint_tells_what_was_plotted(change: dict[str, object]) -> None:
    assert fingerprint(_figure()) == fingerprint(_figure()) != fingerprint(_figure(**change))


def test_fingerprint_forgives_the_last_bits_of_a_number() -> None:
    assert fingerprint(_figure(heights=[1.0 + 1e-9, 2.0])) == fingerprint(_figure())


def test_figure_is_kept_with_its_fingerprint_only_where_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    keep(_figure(), "bars")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    keep(_figure(), "bars")
    assert [file.name for file in tmp_path.iterdir()] == ["bars.png"]
    assert kept_fingerprint(tmp_path / "bars.png") == fingerprint(_figure())
    (tmp_path / "other.png").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match=r"other\.png has no fingerprint"):
        kept_fingerprint(tmp_path / "other.png")


@pytest.mark.slow
def test_layouts_tour_runs_and_shows_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = execute(FOLDER / "layouts_tour.ipynb", tmp_path, monkeypatch)
    assert "DS: kernel, interpreted = oracle" in said
    # What it says of races must not reach this process, which is failed by them.
    assert re.search(r"RACE.DETECTED\n +read of .*\n +write of ", said)
    assert re.search(r"read +by +destination\[\.\.\.\] = stage", said)
    assert_current(tmp_path)


@pytest.mark.slow
def test_speculative_serving_runs_and_its_tokens_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = execute(FOLDER / "speculative_serving.ipynb", tmp_path, monkeypatch)
    assert said.count("12 of 12 tokens are those of plain decoding") == 3
    assert "which needs the copy: wrong from token" in said
    assert_current(tmp_path)


def _record(contenders: tuple[str, ...]) -> dict[str, object]:
    """A record as the benchmark writes it, of times that nobody measured."""
    workloads = [
        Workload(model(name), layout, 1, "post", num_reqs, copying, 1 if name == "qwen3.5-9b" else 0)
        for name in ("qwen3.5-9b", "lfm2-1.2b")
        for layout in ("DS", "SD")
        for num_reqs, copying in ((1, 0), (32, 0), (32, 1), (32, 8))
    ]
    rows = [
        Row.of(workload, contender, (2 + i) * (1e-6 + workload.bytes_moved / 4e12), kernels=1)
        for workload in workloads
        for i, contender in enumerate(contenders)
        if workload.num_copying or contender != "limit"
    ]
    where = {"device": "test", "driver": None, "jax": "0", "triton": None, "torch": None, "vllm": None}
    where |= {"date": "2000-01-01", "method": "invented"}
    return where | {"rows": [dataclasses.asdict(row) for row in rows]}


@pytest.mark.slow
@pytest.mark.skipif(not list((FOLDER / "data").glob("*.json")), reason="No results are kept in notebooks/data.")
def test_benchmark_report_draws_the_kept_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAMBA_STATE_BENCH_DATA", raising=False)
    said = execute(FOLDER / "benchmark_report.ipynb", tmp_path, monkeypatch)
    assert "NO DATA" not in said
    assert_current(tmp_path)


def test_benchmark_report_says_that_there_is_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAMBA_STATE_BENCH_DATA", str(tmp_path))
    said = execute(FOLDER / "benchmark_report.ipynb", tmp_path, monkeypatch)
    assert f"NO DATA: there is no *.json file in the folder '{tmp_path}'" in said
    assert not list(tmp_path.iterdir())


def test_benchmark_report_draws_what_a_run_has_and_names_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, figures = tmp_path / "data", tmp_path / "figures"
    data.mkdir()
    figures.mkdir()
    whole, plain = _record(("limit", "mosaic_gpu", "vllm")), _record(("mosaic_gpu",))
    call = FirstCall("qwen3.5-9b", 24, False, "mosaic_gpu", 1.0, 1.0, 1.5)
    bars = judge([Row(**row) for row in whole["rows"]], [call])
    whole |= {"few_ctas": {"num_ctas": 32}, "bars": list(map(dataclasses.asdict, bars))}
    whole |= {"first_calls": [dataclasses.asdict(call)]}
    (data / "whole.json").write_text(json.dumps(whole))
    (data / "plain.json").write_text(json.dumps(plain))
    monkeypatch.setenv("MAMBA_STATE_BENCH_DATA", str(data))
    said = execute(FOLDER / "benchmark_report.ipynb", figures, monkeypatch)
    assert "plain has no measurement of vLLM's kernel" in said
    assert "plain has no measurement of the limit" in said
    assert "24 layers, separate arrays: 3.50 s" in said
    drawn = {"plain_no_copy", "plain_times", *(f"whole_{name}" for name in ("limit", "no_copy", "times", "vllm"))}
    assert {file.stem for file in figures.glob("*.png")} == drawn
