#!/usr/bin/env bash
# Installs the package with its test needs into a virtual environment (default: .venv) and runs the tests.
#     bash scripts/test.sh [ENVIRONMENT]
set -euo pipefail
cd "$(dirname "$0")/.."
environment=${1:-.venv}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "peagle needs Python 3.11 or newer; PYTHON names another interpreter" >&2; exit 2; }
"$python" -m venv "$environment"
"$environment/bin/pip" install --quiet --upgrade pip
# torch is an oracle of the parity tests: the CPU wheel, where the platform has one, without its CUDA packages
"$environment/bin/pip" install --quiet torch==2.13.0
# the kernels of every instruction set, where an installation compiles those of its machine alone
PEAGLE_INSTRUCTION_SETS=all "$environment/bin/pip" install --quiet -e '.[test]'
# XLA's compiler for GPUs, in a folder of its own: JAX would look for a GPU at every start of an environment that has it
jax=$("$environment/bin/python" -c 'import jax; print(jax.__version__)')
[ "$(uname -sm)" != "Linux x86_64" ] || "$environment/bin/pip" install --quiet --no-deps --upgrade \
  --target "$environment/gpu_compiler" "jax-cuda12-plugin==$jax" "jax-cuda12-pjrt==$jax" nvidia-cuda-nvcc-cu12
"$environment/bin/python" -m pytest
