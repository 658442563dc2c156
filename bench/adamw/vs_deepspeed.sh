#!/usr/bin/env bash
# vs_deepspeed.sh fp32|bf16: vs_deepspeed.py with torch and DeepSpeed 0.19.8 from PyPI, in build/deepspeed.
# The first call installs some 5 GB and compiles DeepSpeed's cpu_adam, which takes minutes; both are kept.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=$PWD/build/deepspeed
if [ ! -x "$venv/bin/deepspeed" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q torch==2.11.0 ninja numpy packaging setuptools wheel
  DS_BUILD_OPS=0 "$venv/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
fi
export PATH=$venv/bin:$PATH TORCH_EXTENSIONS_DIR=$venv/extensions
exec python bench/adamw/vs_deepspeed.py "$1_vs_deepspeed" "${STRATA_BUILD_DIR:-$PWD/build/release}"
