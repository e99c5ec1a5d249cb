#!/usr/bin/env bash
# One job on one ephemeral runner: health check, a runner that takes a single job and ends, health check, workspace wiped.
# Usage: moegate-runner FOLDER          FOLDER holds GitHub's runner (config.sh, run.sh) and jit.conf
#
# jit.conf is a just-in-time configuration (docs/runners.md, section 3): it is good for one job and read once, so no token that
# could register another runner lies on this disk.
set -euo pipefail

folder=${1:?folder of the runner}
health=${MOEGATE_HEALTH:-/usr/local/bin/moegate-health}
cd "$folder"

if ! "$health"; then
    echo "runner: this host is not fit to measure on; no job is taken" >&2
    exit 3
fi
[ -s jit.conf ] || { echo "runner: $folder/jit.conf is missing: docs/runners.md, section 3" >&2; exit 2; }
config=$(cat jit.conf)
rm -f jit.conf

status=0
./run.sh --jitconfig "$config" || status=$?
rm -rf _work
docker ps --all --quiet --filter label=moegate.run | xargs --no-run-if-empty docker rm --force --volumes >/dev/null
"$health" || status=3
exit "$status"
