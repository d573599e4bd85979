"""The README's example runs and prints what it says."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def test_usage_example_runs_as_written(capfd: pytest.CaptureFixture[str]) -> None:
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]  # tests/test_engines.py runs the second one
    variables: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), variables)
    assert capfd.readouterr().out == "[1]\n"
    assert len(list(filter(None, example.splitlines()))) <= 10


def test_readme_names_its_two_commands_first() -> None:
    commands = re.findall(r"^make \w+", README, re.MULTILINE)
    assert commands[:2] == ["make demo", "make test"]
