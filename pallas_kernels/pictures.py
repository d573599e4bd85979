"""What the notebooks share: colours, style, and figures kept as files that tell what was plotted.

A kept PNG carries a fingerprint of its content. The content is what the notebook asked matplotlib to draw (data, texts,
colours and sizes), not pixels, so that another release of matplotlib, which sets type a little differently, gives the
same one.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Annotation

# Okabe and Ito's colours, told apart by the colour-blind.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, WHITE = "#D9D9D9", "#FFFFFF"  # for what is not in question

# The environment variable that names a folder for figures; without it they are only shown.
FOLDER_VARIABLE = "MAMBA_STATE_FIGURES"
_KEY = "Fingerprint"


def set_style() -> None:
    """Makes figures legible on a page as wide as a README."""
    mpl.rcParams.update(
        {
            "figure.constrained_layout.use": True,
            "figure.dpi": 100,
            "savefig.dpi": 150,
            "font.size": 11,
            "axes.titlesize": 12,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "hatch.linewidth": 0.6,
        }
    )


def ink(color: str) -> str:
    """Returns black or white, whichever is read better on a colour."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return BLACK if 0.299 * red + 0.587 * green + 0.114 * blue > 130 else WHITE


def keep(figure: Figure, name: str) -> None:
    """Saves a figure as `name`.png where `FOLDER_VARIABLE` names a folder.

    Args:
      figure: a finished figure.
      name: of the file, without its ending.
    """
    if folder := os.environ.get(FOLDER_VARIABLE):
        # No release of matplotlib in the file either: only what changes the picture should change it.
        metadata = {_KEY: fingerprint(figure), "Software": None}
        figure.savefig(Path(folder) / f"{name}.png", metadata=metadata)


def kept_fingerprint(file: Path) -> str:
    """Returns the fingerprint of a kept figure.

    Raises:
      ValueError: the file has none.
    """
    # PNG stores a short text as it is: the keyword, a zero byte, the text.
    _, found, after = file.read_bytes().partition(_KEY.encode() + b"\0")
    if not found:
        raise ValueError(f"{file.name} has no fingerprint: it was not kept by a notebook")
    return after[:64].decode()


def fingerprint(figure: Figure) -> str:
    """Returns a digest of what was plotted, in hexadecimal."""
    parts = [*map(str, figure.get_size_inches()), *map(_text, figure.texts)]
    if figure.get_suptitle():
        parts.append(figure.get_suptitle())
    for axes in figure.axes:
        parts += _content(axes)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _content(axes: Axes) -> Iterator[str]:
    """A line for each artist, in the order in which they were added."""
    yield f"axes {axes.get_title()} | {axes.get_xlabel()} | {axes.get_ylabel()}"
    yield f"scales {axes.get_xscale()} {axes.get_yscale()}"
    for line in axes.lines:
        look = f"{to_hex(line.get_color())} {line.get_marker()} {line.get_linestyle()} {line.get_linewidth()}"
        yield f"line {line.get_label()} {look} {_numbers(line.get_xydata())}"
    for patch in axes.patches:
        corners = patch.get_path().transformed(patch.get_patch_transform()).vertices
        look = f"{to_hex(patch.get_facecolor())} {to_hex(patch.get_edgecolor())} {patch.get_hatch()}"
        yield f"patch {patch.get_label()} {look} {patch.get_linewidth()} {_numbers(corners)}"
    for collection in axes.collections:
        colors = [to_hex(color) for color in (*collection.get_facecolor(), *collection.get_edgecolor())]
        paths = [_numbers(path.vertices) for path in collection.get_paths()]
        yield f"collection {collection.get_label()} {colors} {_numbers(collection.get_offsets())} {paths}"
    yield from map(_text, axes.texts)
    if legend := axes.get_legend():
        yield from map(_text, legend.get_texts())


def _text(text: Any) -> str:
    place = _numbers([*text.get_position(), *(text.xy if isinstance(text, Annotation) else ())])
    return f"text {text.get_text()!r} {text.get_fontsize()} {to_hex(text.get_color())} {place}"


def _numbers(values: Any) -> str:
    """Numbers to five digits, so that the last bit of a sum does not matter."""
    return " ".join(f"{value + 0.0:.5g}" for value in np.ravel(np.asarray(values, float)))
