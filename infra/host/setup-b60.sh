#!/usr/bin/env bash
# Turn a bare Ubuntu 24.04 host with Arc Pro B60 cards into a runner host. Safe to run again: each step looks before it acts.
# Usage: sudo infra/host/setup-b60.sh [--dry-run] [--clocks MHZ|free] [--user NAME]
#
#   --dry-run      print every command instead of running it
#   --clocks MHZ   fix minimum and maximum GT frequency, for steadier timings (default 2400); `free` leaves the governor alone
#   --user NAME    the account that the runner uses (default moegate-runner)
#
# Not done here, because it needs your GitHub organisation: registering the runner. See docs/runners.md.
set -euo pipefail

dry=0
clocks=2400
user=moegate-runner
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry=1 ;;
        --clocks) clocks=$2; shift ;;
        --user) user=$2; shift ;;
        *) echo "setup-b60: unknown option $1" >&2; exit 2 ;;
    esac
    shift
done
[[ "$clocks" =~ ^([1-9][0-9]{2,3}|free)$ ]] || { echo "setup-b60: --clocks takes MHz or free" >&2; exit 2; }
[[ "$user" =~ ^[a-z][a-z0-9-]{0,30}$ ]] || { echo "setup-b60: --user takes a plain account name" >&2; exit 2; }
if [ "$dry" = 0 ] && [ "$(id -u)" -ne 0 ]; then
    echo "setup-b60: run as root, or with --dry-run" >&2
    exit 2
fi

here=$(cd "$(dirname "$0")" && pwd)
step() { printf '\n== %s\n' "$*"; }
run() {
    if [ "$dry" = 1 ]; then printf '+ %s\n' "$*"; else "$@"; fi
}
installed() { dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q 'install ok installed'; }

step "kernel"
release=$(uname -r)
if printf '6.12\n%s\n' "${release%%-*}" | sort -V -C; then
    echo "kernel $release has the xe driver for Battlemage"
else
    run apt-get install -y linux-generic-hwe-24.04
    echo "kernel $release is older than 6.12: reboot into the new one, then run this again"
fi

step "packages"
if ! installed libze-intel-gpu1; then
    run apt-get update
    run apt-get install -y software-properties-common
    run add-apt-repository -y ppa:kobuk-team/intel-graphics
    run apt-get update
fi
wanted=(libze-intel-gpu1 libze1 intel-opencl-icd clinfo docker.io psmisc git make python3 python3-venv)
missing=()
for package in "${wanted[@]}"; do
    installed "$package" || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    run apt-get install -y --no-install-recommends "${missing[@]}"
else
    echo "all there"
fi

step "account"
id "$user" >/dev/null 2>&1 || run useradd --create-home --shell /bin/bash "$user"
for group in render video docker; do
    id -nG "$user" 2>/dev/null | tr ' ' '\n' | grep -qx "$group" || run usermod -aG "$group" "$user"
done

step "Docker logs and storage bounded"
if [ -s /etc/docker/daemon.json ]; then
    echo "/etc/docker/daemon.json is yours; left alone"
else
    run install -D -m 0644 "$here/docker-daemon.json" /etc/docker/daemon.json
    run systemctl restart docker
fi

step "clock policy"
run install -D -m 0755 "$here/clocks.sh" /usr/local/sbin/moegate-clocks
run install -D -m 0644 "$here/moegate-clocks.service" /etc/systemd/system/moegate-clocks.service
run install -d -m 0755 /etc/moegate
if [ "$dry" = 1 ]; then echo "+ write CLOCKS=$clocks to /etc/moegate/clocks.env"; else echo "CLOCKS=$clocks" >/etc/moegate/clocks.env; fi
run systemctl daemon-reload
run systemctl enable --now moegate-clocks.service

step "runner service"
run install -D -m 0755 "$here/runner.sh" /usr/local/bin/moegate-runner
run install -D -m 0755 "$here/health.sh" /usr/local/bin/moegate-health
unit=$(mktemp)
trap 'rm -f "$unit"' EXIT
sed "s/^User=.*/User=$user/" "$here/moegate-runner.service" >"$unit"
run install -D -m 0644 "$unit" /etc/systemd/system/moegate-runner.service
run systemctl daemon-reload

step "next"
echo "register a runner and start it: docs/runners.md, section 3"
