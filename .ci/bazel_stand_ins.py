"""Writes small local repositories that take the place of those that Bazel would download.

Run by the interpreter of an environment whose packages become the repository `pypi`, one Bazel package each. A package
holds links to just the files of its distribution, so that only what is named in deps can be imported.
"""

import importlib.metadata
import json
import re
import sys
from pathlib import Path

# What Bazel's own packages and BUILD load from each repository's defs.bzl.
RULES = {
    "rules_cc": ("cc", ["cc_binary", "cc_library", "cc_test", "cc_toolchain", "cc_toolchain_suite"]),
    "rules_java": ("java", ["java_binary", "java_import", "java_library", "java_runtime", "java_toolchain"]),
    "rules_proto": ("proto", ["proto_lang_toolchain", "proto_library"]),
    "rules_python": ("python", ["py_binary", "py_library", "py_test"]),
}


def label_name(distribution: str) -> str:
    """ml-dtypes -> ml_dtypes, as rules_python names the packages of its pypi repository."""
    return re.sub(r"[-_.]+", "_", distribution).lower()


def write_package(folder: Path, build: str) -> None:
    """Writes a Bazel package of one BUILD file."""
    folder.mkdir(parents=True)
    (folder / "BUILD").write_text(build)


def write_rules(folder: Path) -> None:
    """Writes rules that are nothing but the ones built into Bazel 4."""
    for repository, (package, rules) in RULES.items():
        write_package(folder / repository / package, "")
        definitions = "".join(f"{rule} = native.{rule}\n" for rule in rules)
        (folder / repository / package / "defs.bzl").write_text(definitions)


def write_coverage_tools(folder: Path) -> None:
    """Writes an empty coverage reporter: every test names it as an input, even where coverage is off."""
    build = 'filegroup(name = "coverage_report_generator", visibility = ["//visibility:public"])\n'
    write_package(folder / "remote_coverage_tools", build)


def write_pypi(folder: Path) -> None:
    """Writes a package for each distribution, with the distributions that it requires as its deps."""
    installed = {label_name(distribution.name): distribution for distribution in importlib.metadata.distributions()}
    for name, distribution in installed.items():
        # What is not installed is not needed by this interpreter; the extras of others are not needed either.
        requirements = [line for line in distribution.requires or [] if "extra ==" not in line]
        required = {label_name(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in requirements}
        deps = [f"//{requirement}" for requirement in sorted(required & installed.keys())]
        build = f"""py_library(
    name = "{name}",
    data = ["site"],
    imports = ["site"],
    visibility = ["//visibility:public"],
    deps = {json.dumps(deps)},
)
"""
        write_package(folder / "pypi" / name, build)
        site = folder / "pypi" / name / "site"
        site.mkdir()
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            (site / top).symlink_to(str(distribution.locate_file(top)))


def main() -> None:
    """Writes all repositories into the folder that the command line names."""
    folder = Path(sys.argv[1])
    write_rules(folder)
    write_coverage_tools(folder)
    write_pypi(folder)
    for repository in folder.iterdir():
        (repository / "WORKSPACE").touch()


if __name__ == "__main__":
    main()
