"""Puts the notebooks into the form in which they are kept: no outputs, and the install cell of install.py first.

`python notebooks/clean.py` does it after they were edited; `make figures` does too.
"""

import sys
from pathlib import Path

import nbformat

FOLDER = Path(__file__).parent


def clean(text: str) -> str:
    """Returns a notebook as it is kept.

    Args:
      text: JSON of the notebook, whose first code cell is the install cell.
    """
    notebook = nbformat.reads(text, as_version=4)
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs, cell.execution_count = [], None
    for cell in notebook.cells:
        cell.metadata = {}
    code[0].source = (FOLDER / "install.py").read_text().rstrip()
    return nbformat.writes(notebook).rstrip() + "\n"


def main() -> int:
    """Cleans every notebook of this folder."""
    for file in sorted(FOLDER.glob("*.ipynb")):
        file.write_text(clean(file.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
