#!/usr/bin/env bash
# deepspeed.sh NAME SCRIPT ARGUMENT...: a Python script with torch and DeepSpeed 0.19.8 from PyPI, in build/deepspeed;
# NAME is the figure's. The first call installs some 5 GB, and DeepSpeed compiles what is used of it, which takes minutes;
# both are kept. Exits with 77 where the installation is not to be had.
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1
shift
venv=$PWD/build/deepspeed
if [ ! -x "$venv/bin/deepspeed" ]; then
  if ! { python3 -m venv "$venv" &&
    "$venv/bin/pip" install -q torch==2.11.0 ninja numpy packaging setuptools wheel &&
    DS_BUILD_OPS=0 "$venv/bin/pip" install -q --no-build-isolation deepspeed==0.19.8; }; then
    reason="torch 2.11.0 and DeepSpeed 0.19.8 could not be installed in build/deepspeed (PyPI)"
    printf 'skipped: %s\n{"name": "%s", "value": null, "skipped": "%s"}\n' "$reason" "$name" "$reason"
    exit 77
  fi
fi
export PATH=$venv/bin:$PATH TORCH_EXTENSIONS_DIR=$venv/extensions
exec python "$@"
