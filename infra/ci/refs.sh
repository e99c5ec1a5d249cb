#!/usr/bin/env bash
# Name the two commits that gate matrices compare, inside the BASE checkout: refs/heads/gate-base is what is checked out there,
# refs/heads/gate-head what is checked out in HEAD. Only objects are copied; nothing of HEAD is executed.
# Usage: infra/ci/refs.sh BASE HEAD
set -euo pipefail

base=$(cd "$1" && pwd)
head=$(cd "$2" && pwd)
git -C "$base" update-ref refs/heads/gate-base "$(git -C "$base" rev-parse --verify HEAD)"
git -C "$base" -c protocol.file.allow=always -c core.hooksPath=/dev/null fetch --quiet --no-tags --update-shallow "$head" \
    "+HEAD:refs/heads/gate-head"
echo "gate-base $(git -C "$base" rev-parse gate-base), gate-head $(git -C "$base" rev-parse gate-head)"
