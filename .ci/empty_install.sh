#!/usr/bin/env bash
# Installs the package alone and requires that pip brought what it declares, what that needs, and nothing else, and that
# it works there without the test tools.
#
#   .ci/empty_install.sh PYTHON     PYTHON is an interpreter >= 3.12
set -euo pipefail

python=${1:?usage: .ci/empty_install.sh PYTHON}
tree=$(cd "$(dirname "$0")/.." && pwd)
temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT

# pip builds inside the folder that it is given, which other jobs may be building in too.
mkdir "$temp/copy"
git -C "$tree" ls-files -z --cached --others --exclude-standard |
  (cd "$tree" && xargs -0 cp --parents --target-directory="$temp/copy")
"$python" -m venv "$temp/venv"
"$temp/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "$temp/copy"
cd "$temp"
"$temp/venv/bin/python" -P - <<'PYTHON'
import importlib.metadata as metadata
import re


def name_of(text):
    return re.match(r"[\w.-]+", text)[0].lower().replace("_", "-")


needed, todo = set(), ["mamba-state-pallas"]
while todo:
    name = todo.pop()
    if name not in needed:
        needed.add(name)
        # What an extra or another platform needs has a marker behind its name.
        lines = metadata.requires(name) or []
        todo += [name_of(line) for line in lines if "extra ==" not in line and "python_version" not in line]
installed = {name_of(package.metadata["Name"]) for package in metadata.distributions()} - {"pip"}
assert installed == needed, f"superfluous: {installed - needed}, missing: {needed - installed}"

import pallas_kernels.demo

assert pallas_kernels.demo.main(["--model", "lfm2-1.2b"]) == 0
print("Installed alone:", *sorted(installed))
PYTHON
