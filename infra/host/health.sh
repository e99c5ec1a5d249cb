#!/usr/bin/env bash
# Is this GPU host fit to measure on? Prints what it finds; exit 3 where a measurement would be wrong or could not run.
# Usage: infra/host/health.sh [--dri DIR] [--sys DIR]      (the options are for tests: another /dev/dri and /sys)
#
# Looks at: render nodes and their driver, groups, clock limits, who else uses a card, Docker, free disk, the kernel's log.
# Every probe has a deadline, because a sick driver hangs rather than fails.
set -uo pipefail

dri=/dev/dri
sys=/sys
while [ $# -gt 0 ]; do
    case $1 in
        --dri) dri=$2 ;;
        --sys) sys=$2 ;;
        *) echo "health: unknown option $1" >&2; exit 2 ;;
    esac
    shift 2
done

bad=0
say() { printf '%-9s %s\n' "$1" "$2"; }
fail() { say "$1" "FAULT: $2"; bad=3; }

date -u '+time      %Y-%m-%dT%H:%M:%SZ'
say kernel "$(uname -r)"

cards=0
for path in "$dri"/by-path/*-render; do
    [ -e "$path" ] || continue
    address=$(basename "$path" | sed -n 's/^pci-\(.*\)-render$/\1/p')
    node=$(basename "$(readlink -f "$path")")
    driver=$(basename "$(readlink -f "$sys/bus/pci/devices/$address/driver" 2>/dev/null)" 2>/dev/null)
    id=$(cat "$sys/bus/pci/devices/$address/device" 2>/dev/null)
    clocks=""
    for freq in "$sys/bus/pci/devices/$address"/tile*/gt*/freq*; do
        [ -e "$freq/min_freq" ] || continue
        clocks="$clocks $(basename "$(dirname "$freq")")=$(cat "$freq/min_freq")-$(cat "$freq/max_freq")MHz"
    done
    say card "$address $node device ${id:-?} driver ${driver:-none}${clocks:- clocks not readable}"
    if [ "$id" = 0xe211 ]; then
        [ "$driver" = xe ] || fail card "$address: Battlemage needs the xe driver, not ${driver:-none}"
    fi
    if [ -r "$path" ] && [ -w "$path" ]; then
        cards=$((cards + 1))
    else
        fail card "$address: $node cannot be opened by $(id -un) (fix: usermod -aG render,video $(id -un), then log in again)"
    fi
done
[ "$cards" -gt 0 ] || fail card "no render node in $dri/by-path that this user can open"

if command -v fuser >/dev/null; then
    users=$(timeout 20 fuser "$dri"/renderD* 2>/dev/null | tr -s ' ')
    [ -z "$users" ] || fail users "other processes hold a card: $users"
fi
if timeout 20 docker version --format '{{.Server.Version}}' >/dev/null 2>&1; then
    say docker "engine $(timeout 20 docker version --format '{{.Server.Version}}')"
    leftover=$(timeout 20 docker ps --quiet --filter label=moegate.run | wc -l)
    [ "$leftover" = 0 ] || fail docker "$leftover containers of an earlier run are still up (fix: orchestrator prune)"
else
    fail docker "no daemon answers"
fi
free=$(df --output=avail --block-size=1G . | tail -n 1 | tr -d ' ')
say disk "$free GiB free"
[ "$free" -ge 20 ] || fail disk "under 20 GiB"
resets=$(timeout 20 dmesg --level=err,warn 2>/dev/null | grep -cE 'xe .*(GT reset|engine reset|wedged)|amdgpu.*GPU reset|NVRM: Xid' || true)
say resets "${resets:-0} GPU resets in the kernel's log since boot"
exit "$bad"
