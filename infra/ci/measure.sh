#!/usr/bin/env bash
# One run on a self-hosted runner: health of the host before and after, the run itself, and its exit code kept.
# Usage: infra/ci/measure.sh MATRIX OUT [OPTION ...]    options go to `orchestrator run`
set -euo pipefail

here=$(cd "$(dirname "$0")/../.." && pwd)
matrix=$1
out=$2
shift 2

cd "$here"
mkdir -p "$(dirname "$out")"
infra/host/health.sh | tee "$(dirname "$out")/health-before.txt"
status=0
.venv/bin/orchestrator run "$matrix" --out "$out" --github "$@" || status=$?
infra/host/health.sh | tee "$(dirname "$out")/health-after.txt" || status=3
echo "orchestrator run: exit $status"
# 0, 1 and 4 are verdicts; the verdict job decides on its own, from the results. Anything else is this host's failure.
case $status in
    0 | 1 | 4) exit 0 ;;
    *) exit "$status" ;;
esac
