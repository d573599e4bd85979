"""Draws the rows of a record: times, and speed beside the memory limit.

`python -m pallas_kernels.bench.plot RESULTS.json OUT.png` needs no GPU.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    message = "pallas_kernels.bench.plot needs matplotlib: install mamba-state-pallas with its extra 'plot'"
    raise ModuleNotFoundError(message, name=error.name) from error

type Rows = Sequence[dict[str, Any]]

# Okabe and Ito's colours, told apart by the colour-blind; ordered from dark to light for grey prints, where hatches and
# markers help too.
STYLES: dict[str, dict[str, str]] = {
    "mosaic_gpu": {"label": "Mosaic GPU kernel (ours)", "color": "#0072B2", "hatch": "", "marker": "o"},
    "vllm": {"label": "vLLM's Triton kernel", "color": "#D55E00", "hatch": "//", "marker": "s"},
    "xla": {"label": "XLA (ours)", "color": "#009E73", "hatch": "\\\\", "marker": "^"},
    "idiom": {"label": "XLA idiom", "color": "#CC79A7", "hatch": "xx", "marker": "v"},
    "empty": {"label": "empty call", "color": "#56B4E9", "hatch": "..", "marker": "P"},
    "limit": {"label": "memory limit (elementwise copy)", "color": "#000000", "hatch": "", "marker": "D"},
}
_COMMON = ("model", "layout", "tp", "operation", "num_reqs", "offset", "paired")


def main(argv: Sequence[str] | None = None) -> int:
    """Draws a record of a JSON file."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench.plot", description=__doc__)
    parser.add_argument("results", help="what the benchmark wrote with --json")
    parser.add_argument("out", help="a PNG, PDF or SVG")
    args = parser.parse_args(argv)
    save(json.loads(Path(args.results).read_text()), args.out)
    return 0


def save(record: dict[str, Any], file: str | Path) -> None:
    """Draws a record into a file.

    Raises:
      ValueError: no row of the record copies anything.
    """
    figure(record).savefig(file, dpi=150)


def figure(record: dict[str, Any]) -> Figure:
    """Returns a figure with two panels for each model: times, and speed beside the limit.

    Of a model that was measured in several ways, the first with the most contenders is drawn, DS and offset 1 before
    others.

    Raises:
      ValueError: no row of the record copies anything.
    """
    series = _series(record["rows"])
    if not series:
        raise ValueError("nothing to draw: no row of the record copies anything")
    drawn = Figure(figsize=(12, 3.6 * len(series)), layout="constrained")
    drawn.suptitle(f"{record['device']}, JAX {record['jax']}, {record['date']}; {record['method']}")
    for (left, right), rows in zip(drawn.subplots(len(series), 2, squeeze=False), series, strict=True):
        plot_times(left, rows)
        plot_speed(right, rows)
    handles: dict[str, Any] = {}
    for axes in drawn.axes[::2]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    drawn.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    return drawn


def plot_times(axes: Axes, rows: Rows) -> None:
    """Draws the time of a step as bars, by the number of copying requests.

    Args:
      axes: where.
      rows: measurements of one workload but for the copying requests.
    """
    contenders = _contenders(rows)
    counts = sorted({row["copying"] for row in rows})
    width = 0.8 / len(contenders)
    for place, name in enumerate(contenders):
        style = STYLES[name]
        times = {row["copying"]: row["seconds"] * 1e6 for row in rows if row["contender"] == name}
        at = [i for i, count in enumerate(counts) if count in times]
        bars = axes.bar(
            [i + (place - (len(contenders) - 1) / 2) * width for i in at],
            [times[counts[i]] for i in at],
            width,
            label=style["label"],
            color=style["color"],
            hatch=style["hatch"],
            edgecolor="white",
        )
        axes.bar_label(bars, fmt=_three_digits, fontsize=7, padding=2, rotation=90)
    axes.set_yscale("log")
    axes.margins(y=0.3)  # room for the labels
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlabel(f"copying requests, of {rows[0]['num_reqs']}")
    axes.set_ylabel("time of a step (µs)")
    axes.set_title(_title(rows[0]))


def plot_speed(axes: Axes, rows: Rows) -> None:
    """Draws bytes per second by the bytes that a step moves, with the limit as the roof.

    Args:
      axes: where.
      rows: measurements of one workload but for the copying requests.
    """
    for name in _contenders(rows):
        points = sorted((row["bytes"], row["seconds"]) for row in rows if row["contender"] == name and row["bytes"])
        if name == "empty" or not points:
            continue
        axes.plot(
            [num_bytes / 2**20 for num_bytes, _ in points],
            [num_bytes / seconds / 1e9 for num_bytes, seconds in points],
            label=STYLES[name]["label"],
            color=STYLES[name]["color"],
            marker=STYLES[name]["marker"],
            linestyle="--" if name == "limit" else "-",
        )
    axes.set_xscale("log")
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.grid(alpha=0.3)
    axes.set_xlabel("bytes read plus bytes written (MiB)")
    axes.set_ylabel("speed (GB/s)")
    axes.set_title("distance to the memory limit")


def _three_digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{float(f'{value:.3g}'):,.10g}"


def _contenders(rows: Rows) -> list[str]:
    measured = {row["contender"] for row in rows}
    return [name for name in STYLES if name in measured]


def _series(rows: Rows) -> list[Rows]:
    """The rows to draw, model by model: one workload but for the copying requests."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["num_ctas"] is None:
            # In vLLM's protocol the whole batch copies, and there is a batch of each size.
            batch = None if row["paired"] else row["num_reqs"]
            groups.setdefault(tuple(batch if key == "num_reqs" else row[key] for key in _COMMON), []).append(row)
    best: dict[str, list[dict[str, Any]]] = {}

    def rank(group: Rows) -> tuple[int, int, bool, bool]:
        copying = len({row["copying"] for row in group if row["bytes"]})
        return copying, len(_contenders(group)), group[0]["layout"] == "DS", group[0]["offset"] == 1

    for group in groups.values():
        name = group[0]["model"]
        if any(row["bytes"] for row in group) and (name not in best or rank(group) > rank(best[name])):
            best[name] = group
    return list(best.values())


def _title(row: dict[str, Any]) -> str:
    """The workload, for people."""
    operation = {"post": "postprocess", "pre": "preprocess", "copy": "copy"}[row["operation"]]
    return f"{row['model']}, TP {row['tp']}, {row['layout']}, {operation}, offset {row['offset']}"


if __name__ == "__main__":
    sys.exit(main())
