#!/usr/bin/env bash
# Install what the whole test suite wants from the distribution: Docker Engine, debootstrap, Chromium and its driver, Node, venv.
# Usage: scripts/host-packages.sh         as root on Debian or Ubuntu; does nothing for what is there.
set -euo pipefail

declare -A wanted=(
    [dockerd]=docker.io
    [debootstrap]=debootstrap
    [chromium]=chromium
    [chromedriver]=chromium-driver
    [git]=git
    [make]=make
    [flock]=util-linux
    [tar]=tar
    [node]=nodejs
    [npm]=npm
)
missing=()
for program in "${!wanted[@]}"; do
    command -v "$program" >/dev/null || missing+=("${wanted[$program]}")
done
python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3 python3-venv python3-pip)
[ -d /etc/ssl/certs ] || missing+=(ca-certificates)

if [ ${#missing[@]} -eq 0 ]; then
    echo "host packages are there"
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "host-packages: missing: ${missing[*]}. Install them: sudo apt-get install ${missing[*]}" >&2
    exit 1
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# The lists on a machine image are often old: a passing mirror fault gets three tries.
for try in 1 2 3; do
    if apt-get update -q >/dev/null && apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null; then
        exit 0
    fi
    echo "host-packages: try $try failed" >&2
    sleep 5
done
exit 1
