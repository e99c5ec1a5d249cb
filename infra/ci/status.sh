#!/usr/bin/env bash
# Set the commit status `moegate/gate` of HEAD_SHA: STATE is pending, success, failure or error; TEXT is one short line.
# Usage: STATE=.. TEXT=.. HEAD_SHA=.. GITHUB_REPOSITORY=.. GH_TOKEN=.. infra/ci/status.sh
set -euo pipefail

[[ "$HEAD_SHA" =~ ^[0-9a-f]{40}$ ]] || { echo "head sha: 40 hexadecimal digits are wanted" >&2; exit 2; }
[[ "$STATE" =~ ^(pending|success|failure|error)$ ]] || { echo "state: $STATE" >&2; exit 2; }
target="$GITHUB_SERVER_URL/$GITHUB_REPOSITORY/actions/runs/$GITHUB_RUN_ID"
# GitHub shows 140 characters; control characters would make a second line of it.
text=$(printf '%s' "${TEXT:-}" | tr -d '[:cntrl:]' | cut -c 1-139)
gh api --method POST "repos/$GITHUB_REPOSITORY/statuses/$HEAD_SHA" --silent \
    -f "state=$STATE" -f "context=moegate/gate" -f "description=$text" -f "target_url=$target"
