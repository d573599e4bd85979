"""The packages import public JAX names and declared packages only, and pyproject.toml gives a reason for each bound.

No Bazel target runs this file, since it reads the whole tree, as tests/test_build.py does.
"""

import ast
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PYPROJECT)["project"]
DECLARED = {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]}
OURS = {"layouts", "pallas_kernels"}
PUBLIC = ("jax", "jax.experimental.pallas")
FILES = sorted(path for folder in ("layouts", "pallas_kernels", "tests") for path in (ROOT / folder).rglob("*.py"))


def imported_modules(source: str) -> Iterator[str]:
    """Every module that is imported, and every dotted name that begins with `jax`, however it is reached."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"jax[\w.]*", name := ast.unparse(node)):
            yield name


def private_names(source: str, *, profiler: bool = False) -> set[str]:
    """The JAX names in `source` that JAX does not promise to keep."""
    found = set()
    for name in imported_modules(source):
        parts = name.split(".")
        if parts[0] not in ("jax", "jaxlib"):
            continue
        experimental = parts[:2] == ["jax", "experimental"] and len(parts) > 2
        allowed = not experimental or parts[2] == "pallas" or (profiler and "profiler" in parts)
        if parts[0] == "jaxlib" or not allowed or any(part.startswith("_") and part != "__version__" for part in parts):
            found.add(name)
    return found


@pytest.mark.parametrize("path", FILES, ids=[path.relative_to(ROOT).as_posix() for path in FILES])
def test_only_public_jax_names_are_used(path: Path) -> None:
    assert private_names(path.read_text(), profiler="bench" in path.parts) == set()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from jax._src import core", "jax._src.core"),
        ("import jax._src.pallas as p", "jax._src.pallas"),
        ("import jax\njax._src.core.Jaxpr", "jax._src.core.Jaxpr"),
        ("from jax.experimental import mosaic", "jax.experimental.mosaic"),
        ("from jaxlib import xla_client", "jaxlib.xla_client"),
    ],
)
def test_private_jax_name_is_found(source: str, name: str) -> None:
    assert name in private_names(source)


PICTURES = ROOT / "pallas_kernels/pictures.py"  # for the notebooks only


def _imported(*paths: Path) -> set[str]:
    """Top-level names that files import, save ours and Python's."""
    names = {name.split(".")[0] for path in paths for name in imported_modules(path.read_text())}
    return names - OURS - set(sys.stdlib_module_names)


def _extra(name: str) -> set[str]:
    """Top-level names of what an extra declares."""
    return {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in PROJECT["optional-dependencies"][name]}


def test_packages_import_what_pyproject_declares_and_nothing_else() -> None:
    files = {*(ROOT / "layouts").glob("*.py"), *(ROOT / "pallas_kernels").glob("*.py")} - {PICTURES}
    imported = _imported(*files)
    assert imported <= DECLARED
    assert DECLARED - imported == {"jaxlib"}  # named for its version only


@pytest.mark.parametrize(("folder", "extra"), [("bench", "plot"), ("serving", "serving")])
def test_subpackages_import_their_extra_besides(folder: str, extra: str) -> None:
    assert _imported(*(ROOT / "pallas_kernels" / folder).glob("*.py")) - DECLARED == _extra(extra)


def test_pictures_import_what_the_notebooks_need_besides() -> None:
    assert _imported(PICTURES) - DECLARED == {"matplotlib"} <= _extra("notebooks")


def test_every_dependency_has_a_floor_and_a_comment_before_it() -> None:
    section = PYPROJECT.split("\ndependencies = [\n")[1].split("\n]\n")[0]
    section += PYPROJECT.split("[project.optional-dependencies]\n")[1].split("\n\n")[0]
    lines = [line.strip() for line in section.splitlines()]
    commented = False
    for line in lines:
        if line.startswith("#"):
            commented = True
        elif line.startswith('"mamba-state-pallas['):
            continue  # its own extras, whose bounds stand below
        elif ">=" in line or line.startswith('"'):
            assert ">=" in line, f"{line} has no floor"
            assert commented, f"nothing says why {line} has its bounds"
        elif line == "]":
            commented = False


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [("pallas_kernels.serving.mamba2", "flax", "serving"), ("pallas_kernels.bench.plot", "matplotlib.axes", "plot")],
)
def test_missing_package_is_said_with_the_extra_that_brings_it(
    module: str, missing: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(missing, reason=f"The message can be tested where {missing} is installed.")
    spec = importlib.util.find_spec(module)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=f"install mamba-state-pallas with its extra '{extra}'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
