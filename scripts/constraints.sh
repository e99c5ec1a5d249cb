#!/usr/bin/env bash
# Write constraints/cpu.txt from what is installed in .venv, keeping the comment at its head.
set -euo pipefail

cd "$(dirname "$0")/.."
head=$(grep '^#' constraints/cpu.txt)
{
    printf '%s\n' "$head"
    .venv/bin/python -m pip freeze --exclude-editable
} >constraints/cpu.txt.new
mv constraints/cpu.txt.new constraints/cpu.txt
