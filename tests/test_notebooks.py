"""The notebooks run from top to bottom, are kept clean, and their figures are those that they draw now."""

import os
import re
import runpy
from pathlib import Path

import nbformat
import pytest
from matplotlib.figure import Figure
from nbclient import NotebookClient

import pallas_kernels
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
    drawn = set(re.findall(r'keep\(\w+, \\"(\w+)\\"\)', "".join(notebook.read_text() for notebook in NOTEBOOKS)))
    assert {file.stem for file in (FOLDER / "figures").glob("*.png")} <= drawn


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
