"""Which container flags one device needs, per vendor: a table and its one reader.

A container gets exactly one device, by its device files or its UUID, so inside it is ordinal 0. It is never masked a
second time: a visibility variable on top of a single visible device selects nothing. Groups are numeric, taken from
the device files of this host, because a group's name is looked up inside the image.

Sources: NVIDIA Container Toolkit (device requests, CDI); AMD's "Running ROCm Docker containers" (kfd always, one render
node per GPU, memory mapping needs an unconfined seccomp profile); Intel's dri nodes with `/dev/dri/by-path`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.pools.slots import HostDevice

__all__ = ["CACHE", "FLAGS", "MASKS", "DeviceFlags", "device_options"]

GIB = 1 << 30

MASKS = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "ONEAPI_DEVICE_SELECTOR",
        "ZE_AFFINITY_MASK",
    }
)
"""Visibility variables, all vendors: none of them may reach a container."""


@dataclass(frozen=True)
class DeviceFlags:
    """What a vendor's containers need.

    Attributes:
        always: device files that every container needs.
        nodes: whether the device's own files are passed.
        by_uuid: whether the device is asked for by UUID (device request, or CDI where the daemon knows that UUID).
        cdi: the CDI kind.
        mounts: host folders, read-only, at the same place.
        security: security options besides no-new-privileges.
        shm_bytes: size of /dev/shm.
        ulimits: name -> value, soft and hard.
        env: fixed variables.
        caches: variables that place compiled code in the cache volume, and cap it where the driver can.
    """

    always: tuple[str, ...] = ()
    nodes: bool = False
    by_uuid: bool = False
    cdi: str = ""
    mounts: tuple[str, ...] = ()
    security: tuple[str, ...] = ()
    shm_bytes: int = GIB
    ulimits: Mapping[str, int] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    caches: Mapping[str, str] = field(default_factory=dict)


CACHE = "/cache"
"""Where the cache volume is mounted."""

_TRITON = {"TRITON_CACHE_DIR": f"{CACHE}/triton"}

FLAGS: Mapping[str, DeviceFlags] = {
    "cpu": DeviceFlags(caches=_TRITON),
    "cuda": DeviceFlags(
        by_uuid=True,
        cdi="nvidia.com/gpu",
        shm_bytes=16 * GIB,
        ulimits={"memlock": -1, "stack": 64 << 20},
        caches={**_TRITON, "CUDA_CACHE_PATH": f"{CACHE}/cuda", "CUDA_CACHE_MAXSIZE": str(4 * GIB)},
    ),
    "rocm": DeviceFlags(
        always=("/dev/kfd",),
        nodes=True,
        security=("seccomp=unconfined",),
        shm_bytes=16 * GIB,
        ulimits={"memlock": -1},
        caches={**_TRITON, "AMD_COMGR_CACHE_DIR": f"{CACHE}/comgr"},
    ),
    "xpu": DeviceFlags(
        nodes=True,
        mounts=("/dev/dri/by-path",),
        shm_bytes=16 * GIB,
        env={"ZE_FLAT_DEVICE_HIERARCHY": "FLAT"},
        caches={
            **_TRITON,
            "NEO_CACHE_PERSISTENT": "1",
            "NEO_CACHE_DIR": f"{CACHE}/neo",
            "NEO_CACHE_MAX_SIZE": str(4 * GIB),
            "SYCL_CACHE_PERSISTENT": "1",
            "SYCL_CACHE_DIR": f"{CACHE}/sycl",
            "SYCL_CACHE_MAX_SIZE": str(4 * GIB),
        },
    ),
}


def _group_of(path: str) -> int:
    return Path(path).stat().st_gid


def device_options(
    device: HostDevice, *, cdi: Collection[str] = (), group_of: Callable[[str], int] | None = None
) -> dict[str, Any]:
    """Return the options of one device as plain data, in the daemon API's words.

    Args:
        device: the device of the slot.
        cdi: the CDI names that the daemon resolves. A specification often lists numbers only, and a number is no
            identity, so CDI is taken just where it has this very UUID.
        group_of: numeric group of a device file (tests give their own).

    Raises:
        OSError: a device file is not there.
    """
    flags, group = FLAGS[device.identity.kind], group_of or _group_of
    paths = list(dict.fromkeys((*flags.always, *(device.nodes if flags.nodes else ()))))
    out: dict[str, Any] = {
        "devices": [f"{path}:{path}:rw" for path in paths],
        "group_add": sorted({group(path) for path in paths} - {0}),
        "mounts": list(flags.mounts),
        "security_opt": list(flags.security),
        "shm_size": flags.shm_bytes,
        "ulimits": dict(flags.ulimits),
        "environment": {**flags.env, **flags.caches},
        "device_requests": [],
    }
    if flags.by_uuid:
        identity = device.identity.identity
        name = f"{flags.cdi}={identity}"
        out["device_requests"] = [
            {"Driver": "cdi", "DeviceIDs": [name]}
            if name in cdi
            else {"DeviceIDs": [identity], "Capabilities": [["gpu"]]}
        ]
    return out
