"""Runs pytest with the arguments that it gets. BUILD makes it the main file of every py_test."""

import sys

import pytest

if __name__ == "__main__":
    # Only the paths that BUILD declares may be importable, so pytest must not add the folder of the test file, and the
    # cache would be written among Bazel's input files.
    raise SystemExit(pytest.main(["--import-mode=importlib", "-p", "no:cacheprovider", *sys.argv[1:]]))
