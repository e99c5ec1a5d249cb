"""Which isolation a pool gets: what the matrix or `--isolation` says, and under `auto` what this host can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from moegate.errors import ImageError, PoolError, UsageError
from moegate.records import ImageSpec, Plan, PoolSpec
from moegate.version import own_version
from orchestrator.pools.isolation import Isolation
from orchestrator.pools.isolation.process import ProcessIsolation

__all__ = ["MODES", "choose", "ensure_images"]

MODES = ("auto", "docker", "process")


def choose(
    pools: Sequence[PoolSpec],
    images: Sequence[ImageSpec],
    *,
    override: str | None,
    root: Path,
    logs: Path,
    say: Callable[[str], None],
) -> dict[str, Isolation | str]:
    """Return each pool's isolation, or in words why it cannot have one.

    override: what `--isolation` says, instead of the pools' own word. root: where Dockerfiles are looked up. logs:
    folder for build logs. Under `auto` a pool whose image cannot be had here takes processes, and the reason is said.
    """
    modes = {pool.name: override or pool.isolation for pool in pools}
    by_name = {image.name: image for image in images}
    process = ProcessIsolation()
    out: dict[str, Isolation | str] = {name: process for name, mode in modes.items() if mode == "process"}
    candidates: dict[str, ImageSpec] = {}
    for pool in pools:
        if pool.name in out:
            continue
        image = by_name.get(pool.image or "")
        reason = f"pool {pool.name} names no image" if image is None else _obstacle(image, root)
        if reason is None and image is not None:
            candidates[pool.name] = image
        elif modes[pool.name] == "docker":
            out[pool.name] = f"isolation docker: {reason}"
        else:
            say(f"pool {pool.name}: processes, not containers: {reason}")
            out[pool.name] = process
    if candidates:
        out |= _containers(candidates, modes, root, logs, say, process)
    return out


def ensure_images(plan: Plan, override: str | None, file: Path) -> None:
    """Refuse `--isolation docker` for a pool without an image, as the matrix refuses `isolation: docker` there.

    Args:
        plan: whose pools count, those that a cell uses. override: what `--isolation` says. file: the matrix.

    Raises:
        UsageError: naming the pools.
    """
    if override != "docker":
        return
    used = {cell.pool for cell in plan.cells}
    bare = [pool.name for pool in plan.pools if pool.name in used and pool.image is None]
    if bare:
        raise UsageError(
            f"docker needs an image, and pool{'s' * (len(bare) > 1)} {', '.join(bare)} name{'s' * (len(bare) == 1)} "
            "none",
            file=file,
            field="--isolation",
            fix=f"write `image: NAME` under pools.{bare[0]}, or leave out its cells with --only",
        )


def _obstacle(image: ImageSpec, root: Path) -> str | None:
    from orchestrator.images import obstacle

    try:
        return obstacle(image, root)
    except (PoolError, ImageError, UsageError) as error:
        return str(error)


def _containers(
    candidates: dict[str, ImageSpec],
    modes: dict[str, str],
    root: Path,
    logs: Path,
    say: Callable[[str], None],
    process: Isolation,
) -> dict[str, Isolation | str]:
    """Build what is missing, and give each pool the daemon; a failed build blocks only the pools of its image."""
    from orchestrator.images import BuildFailure, ensure, write_provenance
    from orchestrator.pools.isolation.docker import DockerIsolation

    specs = {image.name: image for image in candidates.values()}
    say(f"images: {', '.join(specs)} (built where missing; logs in {logs})")
    try:
        built = ensure(list(specs.values()), root, logs, version=own_version())
    except (PoolError, ImageError, UsageError) as error:
        return {name: f"isolation {modes[name]}: {error}" for name in candidates}
    write_provenance(logs, [image for image in built.values() if not isinstance(image, BuildFailure)])
    ids = {name: image.id for name, image in built.items() if not isinstance(image, BuildFailure)}
    isolation = DockerIsolation(ids)
    out: dict[str, Isolation | str] = {}
    for pool, image in candidates.items():
        result = built[image.name]
        if not isinstance(result, BuildFailure):
            out[pool] = isolation
            continue
        for line in result.tail.splitlines():
            say(f"image {image.name} | {line}")
        if modes[pool] == "auto":
            say(f"pool {pool}: processes, not containers: {result.reason}")
            out[pool] = process
        else:
            out[pool] = f"image {image.name}: {result.reason}"
    return out
