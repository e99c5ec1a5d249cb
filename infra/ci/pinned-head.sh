#!/usr/bin/env bash
# Refuse to go on unless HEAD_SHA is, right now, the head of pull request PULL_REQUEST: what was approved is what will run.
# Usage: PULL_REQUEST=12 HEAD_SHA=<40 hex> GITHUB_REPOSITORY=o/r GH_TOKEN=.. infra/ci/pinned-head.sh
set -euo pipefail

[[ "$PULL_REQUEST" =~ ^[1-9][0-9]{0,9}$ ]] || { echo "pull request: a number is wanted" >&2; exit 2; }
[[ "$HEAD_SHA" =~ ^[0-9a-f]{40}$ ]] || { echo "head sha: 40 hexadecimal digits are wanted" >&2; exit 2; }

current=$(gh api "repos/$GITHUB_REPOSITORY/pulls/$PULL_REQUEST" --jq '.head.sha + " " + .state')
if [ "$current" != "$HEAD_SHA open" ]; then
    echo "pull request $PULL_REQUEST is at '$current', not open at $HEAD_SHA: ask again for its present head" >&2
    exit 2
fi
echo "pull request $PULL_REQUEST is open at $HEAD_SHA"
