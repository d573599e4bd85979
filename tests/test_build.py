"""BUILD says what the imports say.

No Bazel target runs this file: it reads the whole tree, and inside Bazel it would see only the files that BUILD already
names. A sandboxed build finds a missing dep only if no other dep brings the module along; this test finds every one.
"""

import ast
import graphlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUNNER = "tests/run_pytest.py"
OUTSIDE_BAZEL = {"tests/test_build.py", "tests/test_dependencies.py"}
ATTRIBUTES = ("srcs", "args", "data", "imports", "main", "tags", "deps")  # in buildifier's order

type Targets = dict[str, dict[str, Any]]  # name -> attributes; "rule" is one of them


def python_files(root: Path) -> list[str]:
    return sorted(
        path.relative_to(root).as_posix()
        for folder in ("layouts", "pallas_kernels", "tests")
        for path in (root / folder).rglob("*.py")
    )


def target_name(path: str) -> str:
    """layouts/__init__.py -> layouts, layouts/state.py -> layouts_state, tests/test_x.py -> test_x."""
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return parts[-1] if parts[-1].startswith("test_") else "_".join(parts)


def module_name(path: str) -> str:
    """The name that imports use. The tests' folder is itself on the path, so its modules are top-level ones."""
    return path.removeprefix("tests/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_names(path: Path) -> Iterator[str]:
    """Every name that might be a module: `from a import b` gives a.b, since b can be a submodule of a."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports are not resolved here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dep(name: str, modules: dict[str, str]) -> str | None:
    """Returns the label of the longest known module that `name` starts with; None for the standard library."""
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    if name in modules:
        return f":{modules[name]}"
    return None if name in sys.stdlib_module_names else f"@pypi//{name}"


def expected_targets(root: Path) -> Targets:
    """Returns the targets that the tree asks for. `data` and `tags` are the least that must be there."""
    files = [path for path in python_files(root) if path != RUNNER and path not in OUTSIDE_BAZEL]
    modules = {module_name(path): target_name(path) for path in files}
    targets: Targets = {}
    for path in files:
        target: dict[str, Any] = {"rule": "py_library", "name": target_name(path), "srcs": [path]}
        if path.startswith("tests/test_"):
            target |= {"rule": "py_test", "srcs": [RUNNER, path], "main": RUNNER, "args": [path]}
            target["data"] = ["pyproject.toml"]  # pytest's settings
        elif path.startswith("tests/"):
            target["imports"] = ["tests"]
        names = {name for source in target["srcs"] for name in imported_names(root / source)}
        if target["rule"] == "py_test" and "conftest" in modules:
            names.add("conftest")  # pytest imports it, not the test
        target["deps"] = sorted({label for name in names if (label := dep(name, modules))})
        targets[target["name"]] = target
    return targets


def parse_build(build: str) -> Targets:
    """Returns BUILD's targets. It holds literals only, so Python's own parser reads it."""
    targets: Targets = {}
    for statement in ast.parse(build).body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)) or call.func.id == "load":
            continue
        target = {"rule": call.func.id} | {str(kw.arg): ast.literal_eval(kw.value) for kw in call.keywords}
        assert target["name"] not in targets, f"two targets are named {target['name']}"
        targets[target["name"]] = target
    return targets


def stanza(target: dict[str, Any]) -> str:
    """Returns a target as BUILD text, ready to be pasted."""
    lines = []
    for name in ("name", *(name for name in ATTRIBUTES if name in target)):
        value = target[name]
        if isinstance(value, list) and len(value) > 1:
            lines += [f"    {name} = [", *(f'        "{item}",' for item in value), "    ],"]
        elif value:
            lines.append(f"    {name} = {json.dumps(value)},")
    return "\n".join([f"{target['rule']}(", *lines, ")"])


def problems(build: str, root: Path) -> list[str]:
    """Returns what is wrong with BUILD, a sentence each."""
    expected, actual = expected_targets(root), parse_build(build)
    found = [f"{name}: no such target; add\n{stanza(expected[name])}" for name in expected.keys() - actual.keys()]
    found += [f"{name}: no module or test is named so" for name in actual.keys() - expected.keys()]
    for name in expected.keys() & actual.keys():
        found += [f"{name}: {problem}" for problem in target_problems(expected[name], actual[name], root)]
    return sorted(found)


def target_problems(expected: dict[str, Any], actual: dict[str, Any], root: Path) -> Iterator[str]:
    for attribute in ("rule", "main"):
        if actual.get(attribute) != expected.get(attribute):
            yield f"{attribute} is {actual.get(attribute)}, expected {expected.get(attribute)}"
    for attribute in (name for name in ATTRIBUTES if name != "main"):
        wanted, given = expected.get(attribute, []), actual.get(attribute, [])
        for item in sorted(set(wanted) - set(given)):
            yield f"{attribute} lacks {item}"
        for item in sorted(set(given) - set(wanted)):
            if attribute not in ("data", "tags"):
                yield f"{attribute} has a superfluous {item}"
            elif attribute == "data" and not (root / item).exists():
                yield f"data names {item}, which does not exist"
        for item in sorted({item for item in given if given.count(item) > 1}):
            yield f"{attribute} repeats {item}"
        if given != sorted(given):
            yield f"{attribute} is not sorted"


def test_build_agrees_with_the_imports() -> None:
    found = problems((ROOT / "BUILD").read_text(), ROOT)
    assert not found, "\n".join(found)


def test_every_test_file_that_needs_less_than_the_tree_has_a_py_test() -> None:
    targets = parse_build((ROOT / "BUILD").read_text()).values()
    files = [path for path in python_files(ROOT) if path.startswith("tests/test_")]
    assert sum(target["rule"] == "py_test" for target in targets) == len(files) - len(OUTSIDE_BAZEL)


def test_some_tests_are_tagged_for_the_smoke_run() -> None:
    targets = parse_build((ROOT / "BUILD").read_text()).values()
    assert any(target["rule"] == "py_test" and "smoke" in target.get("tags", []) for target in targets)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Bazel refuses such a circle. `from layouts import x` inside `layouts/` is the easy way into one."""
    graph = {f":{name}": target["deps"] for name, target in expected_targets(ROOT).items()}
    graphlib.TopologicalSorter(graph).prepare()


# A small tree, and a BUILD that agrees with it, for the tests of this file's own functions.
TREE = {
    "layouts/__init__.py": "from layouts.state import State",
    "layouts/state.py": "import dataclasses\nimport jax.numpy as jnp\nfrom chex import assert_rank",
    "pallas_kernels/__init__.py": "from layouts import state, State",
    "tests/cases.py": "import numpy.random",
    "tests/conftest.py": "from pytest import fixture",
    "tests/run_pytest.py": "import sys\nimport pytest",
    "tests/test_state.py": "def test_state():\n    import cases\n    import pallas_kernels as pk",
    "pyproject.toml": "",
}
TREE_BUILD = """load("@rules_python//python:defs.bzl", "py_library", "py_test")

py_library(
    name = "layouts",
    srcs = ["layouts/__init__.py"],
    deps = [":layouts_state"],
)

py_library(
    name = "layouts_state",
    srcs = ["layouts/state.py"],
    deps = [
        "@pypi//chex",
        "@pypi//jax",
    ],
)

py_library(
    name = "pallas_kernels",
    srcs = ["pallas_kernels/__init__.py"],
    deps = [
        ":layouts",
        ":layouts_state",
    ],
)

py_library(
    name = "tests_cases",
    srcs = ["tests/cases.py"],
    imports = ["tests"],
    deps = ["@pypi//numpy"],
)

py_library(
    name = "tests_conftest",
    srcs = ["tests/conftest.py"],
    imports = ["tests"],
    deps = ["@pypi//pytest"],
)

py_test(
    name = "test_state",
    srcs = [
        "tests/run_pytest.py",
        "tests/test_state.py",
    ],
    args = ["tests/test_state.py"],
    data = ["pyproject.toml"],
    main = "tests/run_pytest.py",
    deps = [
        ":pallas_kernels",
        ":tests_cases",
        ":tests_conftest",
        "@pypi//pytest",
    ],
)
"""
CASES = next(text for text in TREE_BUILD.split("\n\n") if "tests/cases.py" in text)

# Text in TREE_BUILD, what takes its place, and the problem that follows.
DOCTORED = [
    ('        "@pypi//chex",\n', "", "layouts_state: deps lacks @pypi//chex"),
    ('        ":layouts",\n', "", "pallas_kernels: deps lacks :layouts"),
    ('        ":tests_cases",\n', "", "test_state: deps lacks :tests_cases"),
    ('        ":tests_conftest",\n', "", "test_state: deps lacks :tests_conftest"),
    ('    deps = ["@pypi//numpy"],\n', "", "tests_cases: deps lacks @pypi//numpy"),
    ('"@pypi//jax",', '"@pypi//jax", "@pypi//numpy",', "layouts_state: deps has a superfluous @pypi//numpy"),
    ('"@pypi//jax",', '"@pypi//jax", "@pypi//jax",', "layouts_state: deps repeats @pypi//jax"),
    ('"@pypi//chex",\n        "@pypi//jax"', '"@pypi//jax", "@pypi//chex"', "layouts_state: deps is not sorted"),
    (
        '["tests/cases.py"]',
        '["tests/cases.py", "tests/gone.py"]',
        "tests_cases: srcs has a superfluous tests/gone.py",
    ),
    (
        '    imports = ["tests"],\n    deps = ["@pypi//numpy"]',
        '    deps = ["@pypi//numpy"]',
        "tests_cases: imports lacks tests",
    ),
    ('"pyproject.toml"', '"gone.npz", "pyproject.toml"', "test_state: data names gone.npz, which does not exist"),
    ("py_test(", "py_binary(", "test_state: rule is py_binary, expected py_test"),
    (CASES, "", f"tests_cases: no such target; add\n{CASES}"),
    (CASES, CASES.replace("cases", "gone") + "\n" + CASES, "tests_gone: no module or test is named so"),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_build_that_agrees_with_its_tree_has_no_problems(tree: Path) -> None:
    assert problems(TREE_BUILD, tree) == []


@pytest.mark.parametrize(("old", "new", "expected"), DOCTORED, ids=[case[2].splitlines()[0] for case in DOCTORED])
def test_a_doctored_build_is_reported_with_the_name_of_the_target(
    tree: Path, old: str, new: str, expected: str
) -> None:
    assert TREE_BUILD.count(old) == 1
    assert problems(TREE_BUILD.replace(old, new), tree) == [expected]


@pytest.mark.parametrize("computed", ['glob(["layouts/*.py"])', '[file for file in ["layouts/state.py"]]'])
def test_a_list_that_is_computed_is_refused(tree: Path, computed: str) -> None:
    with pytest.raises(ValueError, match="malformed node"):
        problems(TREE_BUILD.replace('["layouts/state.py"]', computed), tree)


def test_two_targets_of_one_name_are_refused(tree: Path) -> None:
    with pytest.raises(AssertionError, match="two targets are named tests_cases"):
        problems(TREE_BUILD + CASES, tree)
