#!/usr/bin/env bash
# The check step of action.yml: turns its inputs (environment variables, never pasted into a script) into one command line.
# Usage: ENGINE=sglang CONFIGS=python/sglang ... infra/ci/check.sh ORCHESTRATOR
set -euo pipefail

orchestrator=${1:-orchestrator}
argv=("$orchestrator" check --github "--engine=${ENGINE:-moegate}" "--sarif=${SARIF:-moegate-check.sarif}")
while IFS= read -r line; do
    [ -z "$line" ] || argv+=("--configs=$line")
done <<<"${CONFIGS:-}"
while IFS= read -r line; do
    [ -z "$line" ] || argv+=("--models=$line")
done <<<"${MODELS:-}"
[ -z "${DEVICES:-}" ] || argv+=("--devices=$DEVICES")
[ -z "${BASE:-}" ] || argv+=("--base=$BASE" --only-new)
[ -z "${TRITON:-}" ] || argv+=("--triton=$TRITON")
[ -z "${SOURCE:-}" ] || argv+=("--source=$SOURCE")

status=0
"${argv[@]}" || status=$?
[ -z "${GITHUB_OUTPUT:-}" ] || echo "sarif=${SARIF:-moegate-check.sarif}" >>"$GITHUB_OUTPUT"
exit "$status"
