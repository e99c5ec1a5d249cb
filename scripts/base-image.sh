#!/usr/bin/env bash
# Make the local base image of dockerfiles/cpu.Dockerfile with debootstrap, where no registry can be reached.
# Usage: scripts/base-image.sh [NAME]     default NAME: moegate-base:bookworm
# Does nothing when the image is there. Needs root, debootstrap, tar and a Docker daemon. Takes about a minute and 300 MB.
set -euo pipefail

name=${1:-moegate-base:bookworm}

if docker image inspect "$name" >/dev/null 2>&1; then
    echo "base image $name is there"
    exit 0
fi
for tool in debootstrap tar docker; do
    command -v "$tool" >/dev/null || { echo "base-image: $tool is missing: apt-get install debootstrap docker.io tar" >&2; exit 1; }
done
if [ "$(id -u)" -ne 0 ]; then
    echo "base-image: debootstrap needs root: sudo scripts/base-image.sh $name" >&2
    exit 1
fi

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
echo "debootstrap into $name (about a minute)"
debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates bookworm "$root" >"$root.log" 2>&1 || {
    tail -n 20 "$root.log" >&2
    rm -f "$root.log"
    exit 1
}
rm -f "$root.log"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
# The image must not carry this host's name service or package sources.
rm -f "$root"/etc/resolv.conf "$root"/etc/hostname
tar -C "$root" --numeric-owner -c . | docker import \
    --change 'CMD ["/bin/sh"]' \
    --change 'LABEL org.opencontainers.image.title=moegate-base org.opencontainers.image.version=bookworm' \
    - "$name"
