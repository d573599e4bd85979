#!/usr/bin/env bash
# Runs the tests tagged "smoke" under Bazel, then removes deps one at a time and requires that the test fails.
#
#   .ci/bazel_smoke.sh PYTHON     PYTHON is that of an environment with the project and its extra `test`, which is left
#                                 as it is; only installing Bazel needs root
#
# Nothing enters the tree: Bazel runs on a copy, beside stand-ins for the repositories that it would download.
set -euo pipefail

python=${1:?usage: .ci/bazel_smoke.sh PYTHON}
site_packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
tree=$(cd "$(dirname "$0")/.." && pwd)
temp=$(mktemp -d)
copy=$temp/copy
packages=$temp/packages
repositories=$temp/repositories

bazel() {
  # Debian's Bazel finds its own parts through the system's settings file, so only the user's is ignored.
  (cd "$copy" && command bazel --nohome_rc --output_user_root="$temp/bazel" --max_idle_secs=60 "$@")
}

clean_up() {
  bazel shutdown >/dev/null 2>&1 || true
  chmod -R u+w "$temp" # Bazel write-protects its outputs.
  rm -rf "$temp"
}
trap clean_up EXIT

if ! type -P bazel >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends bazel-bootstrap >/dev/null
fi

mkdir "$copy"
git -C "$tree" ls-files -z --cached --others --exclude-standard |
  (cd "$tree" && xargs -0 cp --parents --target-directory="$copy")
touch "$copy/WORKSPACE"

# A copy of the packages without the project: a missing dep must not be made good from here. And without what Python
# compiles, which others may be writing now.
"$python" -m venv --without-pip "$packages"
packages_site=$("$packages/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
(cd "$site_packages" && find . -name __pycache__ -prune -o -type f -print0 |
  xargs -0 cp --parents --target-directory="$packages_site")
"$packages/bin/python" -m pip uninstall --quiet --yes mamba-state-pallas
# Every test imports these, and could not keep what Python compiles of them.
env -u PYTHONDONTWRITEBYTECODE "$packages/bin/python" -c 'import chex, jax.experimental.pallas.mosaic_gpu, pytest'
"$packages/bin/python" "$tree/.ci/bazel_stand_ins.py" "$repositories"
overrides=()
for repository in "$repositories"/*; do
  overrides+=("--override_repository=$(basename "$repository")=$repository")
done

# The tests' interpreter has nothing installed, so every import must come through a dep.
"$python" -m venv --without-pip "$temp/bare"

bazel_test() {
  # Bazel finds the interpreter through PATH. Its safe mode keeps the real folder of the main file, which has more files
  # than the test may see, off the import path. Where BUILD names no __init__.py, Bazel must not make an empty one.
  PATH="$temp/bare/bin:$PATH" bazel test "${overrides[@]}" --symlink_prefix=/ --noshow_progress --nosandbox_debug \
    --test_output=errors --test_env=PATH --test_env=PYTHONSAFEPATH=1 --incompatible_default_to_explicit_init_py "$@"
}

# Requires that test_conv_state runs but fails to import (status 3, not 1) once dep $2 is removed from target $1.
fails_without() {
  local status=0
  sed "/name = \"$1\",/,/^)/ { \\|\"$2\",\$|d }" "$tree/BUILD" >"$copy/BUILD"
  if cmp -s "$tree/BUILD" "$copy/BUILD"; then
    echo "There is no dep $2 in $1 to remove" >&2
    return 1
  fi
  bazel_test //:test_conv_state >"$temp/output" 2>&1 || status=$?
  if [ "$status" != 3 ] || ! grep -q ModuleNotFoundError "$temp/output"; then
    cat "$temp/output"
    echo "test_conv_state must fail to import without dep $2 of $1; Bazel's status is $status." >&2
    echo "Status 0 may mean that another dep has come to bring the same module along." >&2
    return 1
  fi
  echo "Without dep $2 of $1, test_conv_state fails: $(grep -m1 -o 'ModuleNotFoundError.*' "$temp/output")"
}

bazel_test --test_tag_filters=smoke //...
fails_without test_conv_state :layouts
fails_without layouts :layouts_models
fails_without layouts_contracts @pypi//chex
