#!/usr/bin/env bash
# Make sure that a Docker daemon answers: start dockerd where none does. Needs root to start one.
# Usage: scripts/docker-daemon.sh         log: ${DOCKERD_LOG:-/var/log/moegate-dockerd.log}
set -euo pipefail

answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

if answers; then
    echo "Docker daemon answers: $(docker version --format '{{.Server.Version}} (API {{.Server.APIVersion}})')"
    exit 0
fi
command -v dockerd >/dev/null || { echo "docker-daemon: dockerd is missing: apt-get install docker.io" >&2; exit 1; }
if [ "$(id -u)" -ne 0 ]; then
    echo "docker-daemon: no daemon answers. Start one: sudo scripts/docker-daemon.sh" >&2
    exit 1
fi

# A killed daemon leaves its pid file; when the pid was given to another program, dockerd refuses to start.
for file in /var/run/docker.pid /run/docker/containerd/containerd.pid; do
    if [ -s "$file" ] && ! grep -qsE '^(dockerd|containerd)$' "/proc/$(cat "$file")/comm"; then
        rm -f "$file"
    fi
done

log=${DOCKERD_LOG:-/var/log/moegate-dockerd.log}
setsid nohup dockerd >"$log" 2>&1 </dev/null &
for _ in $(seq 60); do
    if answers; then
        echo "Docker daemon started: $(docker version --format '{{.Server.Version}} (API {{.Server.APIVersion}})')"
        exit 0
    fi
    sleep 1
done
echo "docker-daemon: dockerd did not answer within 60 s; the end of $log:" >&2
tail -n 20 "$log" >&2
exit 1
