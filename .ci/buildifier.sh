#!/usr/bin/env bash
# Fails if BUILD is not formatted as buildifier formats it, or if buildifier's linter finds anything. Needs npm.
set -euo pipefail

cd "$(dirname "$0")/.."
temp=$(mktemp -d)
trap 'rm -rf "$temp"' EXIT

npm install --silent --no-audit --no-fund --prefix "$temp" @bazel/buildifier@8.2.1
"$temp/node_modules/.bin/buildifier" --mode=check --lint=warn --warnings=all BUILD
