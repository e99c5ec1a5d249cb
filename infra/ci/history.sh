#!/usr/bin/env bash
# Add what a night measured to the history, and show its newest runs. A night that brought nothing adds nothing.
# Usage: infra/ci/history.sh HISTORY.sqlite REVISION RUN ...     env BRANCH (default main), GITHUB_STEP_SUMMARY
set -euo pipefail

db=$1
revision=$2
shift 2
[[ "$revision" =~ ^[0-9a-f]{40}$ ]] || { echo "history: revision: 40 hexadecimal digits are wanted" >&2; exit 2; }

status=0
for run in "$@"; do
    if [ ! -f "$run/plan.json" ]; then
        echo "history: $run: nothing was received"
    elif ! orchestrator history import "$run" --db "$db" --branch "${BRANCH:-main}" --revision "$revision"; then
        echo "history: $run: cannot be believed, and is left out" >&2
        status=1
    fi
done
[ -f "$db" ] || { echo "history: there is none yet"; exit "$status"; }
{ echo '```'; orchestrator history list --db "$db" --limit 20; echo '```'; } | tee -a "${GITHUB_STEP_SUMMARY:-/dev/null}"
exit "$status"
