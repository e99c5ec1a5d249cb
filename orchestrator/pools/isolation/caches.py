"""The volumes of compiled kernels, kept under a cap. Drivers cap their own caches (`flags`); Triton's only grows.

A volume over the cap is removed whole when no container uses it: what it held is compiled again, which costs the next
launch some minutes and nothing else. Looked at when a run begins and when it ends.
"""

from __future__ import annotations

import contextlib
from typing import Any

from orchestrator import daemon

__all__ = ["CAP_BYTES", "trim"]

CAP_BYTES = 16 << 30
"""Bytes that one volume may hold between runs."""

_TYPED = (1, 42)  # since this API version the daemon can be asked for volumes alone


def trim(client: Any, cap_bytes: int = CAP_BYTES) -> list[str]:
    """Remove our cache volumes that are over the cap and not in use; return their names. Never raises."""
    gone: list[str] = []
    with contextlib.suppress(Exception):  # a daemon that cannot say must not end a run
        for volume in _volumes(client):
            usage = volume.get("UsageData") or {}
            ours = f"{daemon.LABEL}.cache" in (volume.get("Labels") or {})
            if ours and usage.get("Size", 0) > cap_bytes and usage.get("RefCount") == 0:
                client.api.remove_volume(volume["Name"])
                gone.append(str(volume["Name"]))
    return gone


def _volumes(client: Any) -> list[dict[str, Any]]:
    version = tuple(int(part) for part in str(client.api.api_version).split("."))
    params = {"type": "volume"} if version >= _TYPED else {}
    found = client.api._result(client.api._get(client.api._url("/system/df"), params=params), True)
    return list(found.get("Volumes") or [])
