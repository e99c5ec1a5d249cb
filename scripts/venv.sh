#!/usr/bin/env bash
# Build or renew .venv: python3's venv, the pinned set of constraints/cpu.txt, and this project, editable.
# Usage: scripts/venv.sh [STAMP]          PYTHON=python3.12 scripts/venv.sh chooses the interpreter.
set -euo pipefail

cd "$(dirname "$0")/.."
stamp=${1:-.venv/.moegate-stamp}
python=${PYTHON:-python3}
source scripts/torch-source.sh

# Two `make` at once: the second waits, then finds the work done.
if command -v flock >/dev/null && [ -z "${MOEGATE_VENV_LOCKED:-}" ]; then
    exec env MOEGATE_VENV_LOCKED=1 flock .venv.lock "$0" "$@"
fi
if [ "$stamp" -nt pyproject.toml ] && [ "$stamp" -nt constraints/cpu.txt ] && [ "$stamp" -nt scripts/venv.sh ]; then
    exit 0
fi

need_python() {
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        echo "installing python3, python3-venv and python3-pip"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -q >/dev/null
        apt-get install -y -q --no-install-recommends python3 python3-venv python3-pip >/dev/null
    else
        echo "$1: sudo apt-get install python3 python3-venv python3-pip (or your system's equivalent), then again" >&2
        exit 1
    fi
}
command -v "$python" >/dev/null || need_python "$python is missing"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "$python is older than 3.11: install a newer one and name it: PYTHON=python3.12 make" >&2
    exit 1
}
"$python" -c 'import ensurepip, venv' 2>/dev/null || need_python "$python has no venv module"

# A folder whose interpreter is gone (a moved clone, a removed Python) is no environment.
if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    rm -rf .venv
    "$python" -m venv .venv
fi

pip=(.venv/bin/python -m pip --disable-pip-version-check)
echo "installing into .venv (a minute or two the first time)"
log=.venv/install.log
# shellcheck disable=SC2046  # options and their values are words
if ! {
    "${pip[@]}" install --no-input --no-deps $(torch_options "${pip[@]}") "$torch_pin" &&
        "${pip[@]}" install --no-input --constraint constraints/cpu.txt --editable '.[cpu,ray,dev]'
} >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    echo "venv: the installation failed; all of its output is in $log" >&2
    exit 1
fi
touch "$stamp"
