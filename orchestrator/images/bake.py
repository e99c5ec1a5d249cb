"""`docker buildx bake` through a generated JSON file: all images of a run in one call, stages shared, in parallel."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moegate import canonical
from moegate.errors import UsageError
from orchestrator.images.request import BuildRequest

__all__ = ["CACHE_VARIABLE", "TARGET_FIELDS", "available", "bake_file", "command", "read_metadata", "target_name"]

CACHE_VARIABLE = "MOEGATE_BUILD_CACHE"
"""Where build layers are kept between machines, as buildx spells it; `{name}` is the image's name.

`type=gha,scope={name}` in GitHub Actions, `type=registry,ref=REG/cache:{name}`, `type=local,dest=DIR/{name}`.
"""

TARGET_FIELDS = frozenset(
    {
        "context",
        "dockerfile",
        "target",
        "args",
        "labels",
        "tags",
        "network",
        "cache-from",
        "cache-to",
        "output",
        "attest",
    }
)
"""The target attributes that we write; all are in buildx's bake file reference."""

_UNSAFE = re.compile(r"[^a-zA-Z0-9_-]+")


def target_name(name: str) -> str:
    """Bake target names take letters, digits, `_` and `-` only."""
    return _UNSAFE.sub("-", name)


def available(docker: str = "docker") -> bool:
    """Whether this host has the docker client with its buildx plugin."""
    try:
        done = subprocess.run([docker, "buildx", "version"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _cache(name: str) -> dict[str, list[str]]:
    chosen = os.environ.get(CACHE_VARIABLE)
    if not chosen:
        return {}
    entry = chosen.replace("{name}", target_name(name))
    source, into = entry.replace("dest=", "src="), entry.replace("src=", "dest=")
    return {"cache-from": [source], "cache-to": [into + ",mode=max"]}


def bake_file(requests: Sequence[BuildRequest]) -> dict[str, Any]:
    """Return the bake document of these requests: one target each, and a `default` group of all.

    Attestations are off: they would turn the image into an index and its digest into one that changes every time.
    """
    targets: dict[str, dict[str, Any]] = {}
    for request in requests:
        target: dict[str, Any] = {
            "context": str(request.recipe.context),
            "dockerfile": str(request.recipe.path),
            "args": dict(sorted(request.args.items())),
            "labels": dict(sorted(request.labels.items())),
            "tags": [request.tag],
            "output": ["type=docker"],
            "attest": ["type=provenance,disabled=true", "type=sbom,disabled=true"],
            **_cache(request.name),
        }
        if request.target:
            target["target"] = request.target
        if request.network:
            target["network"] = request.network
        name = target_name(request.name)
        if name in targets:
            raise UsageError(f"two images have the bake target name {name}", field=f"images.{request.name}")
        targets[name] = target
    return {"group": {"default": {"targets": sorted(targets)}}, "target": targets}


def command(file: Path, metadata: Path, names: Sequence[str] = (), docker: str = "docker") -> list[str]:
    """Return the argument vector that builds `names` (all when empty) and writes what came out to `metadata`."""
    return [
        docker,
        "buildx",
        "bake",
        f"--file={file}",
        f"--metadata-file={metadata}",
        "--progress=plain",
        *(target_name(name) for name in names),
    ]


def read_metadata(path: Path) -> dict[str, str]:
    """Return target name -> image config digest from bake's metadata file (empty where there is none)."""
    if not path.is_file():
        return {}
    document = canonical.load_json(path)
    found: dict[str, str] = {}
    for name, entry in document.items():
        if isinstance(entry, dict):
            digest = entry.get("containerimage.config.digest") or entry.get("containerimage.digest")
            if isinstance(digest, str):
                found[name] = digest
    return found
