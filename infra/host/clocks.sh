#!/usr/bin/env bash
# Set and record the clock policy of every Intel card of this host. Never fails silently: what was refused is printed and exit is 1.
# Usage: clocks.sh MHZ|free [--sys DIR]       writes what was asked and what holds to /run/moegate-clocks
set -uo pipefail

want=${1:?MHZ or free}
sys=/sys
[ "${2:-}" != --sys ] || sys=$3
record=${MOEGATE_CLOCKS_RECORD:-/run/moegate-clocks}

status=0
: >"$record"
for freq in "$sys"/bus/pci/drivers/xe/*/tile*/gt*/freq*; do
    [ -e "$freq/min_freq" ] || continue
    if [ "$want" = free ]; then
        low=$(cat "$freq/rpn_freq") high=$(cat "$freq/rp0_freq")
    else
        low=$want high=$want
    fi
    # The order matters: the driver refuses a minimum above the present maximum.
    for attempt in 1 2; do
        echo "$high" 2>/dev/null >"$freq/max_freq" || true
        echo "$low" 2>/dev/null >"$freq/min_freq" || true
    done
    has="$(cat "$freq/min_freq")-$(cat "$freq/max_freq")"
    echo "${freq#"$sys"/bus/pci/drivers/xe/} asked $low-$high MHz, has $has MHz" | tee -a "$record"
    [ "$has" = "$low-$high" ] || { echo "clocks: refused (attempt $attempt)" >&2; status=1; }
done
[ -s "$record" ] || { echo "clocks: no card with the xe driver" >&2; status=1; }
exit "$status"
