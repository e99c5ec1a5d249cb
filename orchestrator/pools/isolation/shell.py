"""A container's options as the command line that a person types to do the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.pools.isolation.flags import CACHE

__all__ = ["shell_command"]


def shell_command(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The `docker run` line that does the same by hand (with the limits and without the labels)."""
    flags = [
        "--rm",
        "--init",
        "--read-only",
        f"--network={options['network_mode']}",
        f"--user={options['user']}",
        f"--hostname={options['hostname']}",
        f"--workdir={options['working_dir']}",
        "--cap-drop=ALL",
        *(f"--security-opt={item}" for item in options["security_opt"]),
        *(f"--tmpfs={path}:{how}" for path, how in options["tmpfs"].items()),
        f"--pids-limit={options['pids_limit']}",
        f"--memory={options['mem_limit']}",
        f"--memory-swap={options['memswap_limit']}",
        *([f"--cpuset-cpus={options['cpuset_cpus']}"] if options["cpuset_cpus"] else []),
        f"--shm-size={options['shm_size']}",
        *(f"--device={item}" for item in options["devices"]),
        *(f"--ulimit={name}={value}" for name, value in options["ulimits"].items()),
        *(_asked(item, name) for item in options["device_requests"] for name in item["DeviceIDs"]),
        *(f"--group-add={gid}" for gid in options["group_add"]),
        *(f"--env={name}={value}" for name, value in sorted(options["environment"].items())),
        f"--volume={options['cache']}:{CACHE}",
        *(f"--volume={path}:{path}{':ro' if ro else ''}" for path, ro in options["mounts"].items()),
    ]
    return ("docker", "run", *flags, options["image"], *options["command"])


def _asked(item: Mapping[str, Any], name: str) -> str:
    return f"--device={name}" if item.get("Driver") == "cdi" else f"--gpus=device={name}"
