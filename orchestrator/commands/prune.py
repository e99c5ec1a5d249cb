"""`orchestrator prune`: remove old runs, environments of commits, and containers and images that nobody uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("prune", epilog="Example: orchestrator prune --older 30d --dry-run")(prune)


def prune(
    runs: Annotated[Path, typer.Option(help="Folder of run directories.")] = Path("runs"),
    older: Annotated[str, typer.Option(help="Age, such as 30d or 12h.")] = "30d",
    docker: Annotated[bool, typer.Option(help="Also containers, images and caches that carry our label.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Remove what is older than an age: runs, environments of arms with a `source`, and our containers and images.

    What a run uses stays, and nothing else is touched.
    """
    from orchestrator.commands._output import emit_json
    from orchestrator.sources import old_environments

    age_s = _age(older)
    gone: dict[str, list[str]] = {"runs": _prune_runs(runs, age_s, dry_run)}
    gone["sources"] = old_environments(age_s, remove=not dry_run)
    if docker:
        gone |= _prune_docker(age_s, dry_run)
    if as_json:
        emit_json({"removed": gone, "dry_run": dry_run})
        return
    for what, names in gone.items():
        for name in names:
            print(f"{'would remove' if dry_run else 'removed'} {what}: {name}")
    print(f"{sum(map(len, gone.values()))} {'would be ' if dry_run else ''}removed")


def _age(text: str) -> float:
    from pydantic import TypeAdapter, ValidationError

    from moegate.errors import UsageError
    from orchestrator.scalars import Duration

    try:
        return float(TypeAdapter(Duration).validate_python(text))
    except ValidationError:
        raise UsageError(f"{text!r} is not an age", field="--older", fix="write 30d, 12h or 45m") from None


def _prune_runs(runs: Path, age_s: float, dry_run: bool) -> list[str]:
    """Run directories by the age of their journal. One that is held, or is not a run's, stays."""
    import shutil
    import time

    from moegate.paths import is_file
    from orchestrator.scheduler import RunDir

    out = []
    for folder in sorted(runs.iterdir()) if runs.is_dir() else ():
        journal = folder / "journal"
        if folder.is_symlink() or not is_file(folder / "plan.json") or not is_file(journal):
            continue
        if time.time() - journal.stat().st_mtime < age_s or RunDir(folder).holder() is not None:
            continue
        if not dry_run:
            shutil.rmtree(folder)
        out.append(str(folder))
    return out


def _prune_docker(age_s: float, dry_run: bool) -> dict[str, list[str]]:
    """Containers that ended or lost their orchestrator, images and cache volumes: with our labels, by creation time."""
    from moegate.errors import PoolError
    from orchestrator import daemon
    from orchestrator.commands._output import say

    try:
        client = daemon.connect(timeout_s=30.0)
    except PoolError as error:
        say(f"note: {error}")
        return {}
    try:
        return {
            "containers": _containers(client, age_s, dry_run),
            "images": _images(client, age_s, dry_run),
            "caches": _volumes(client, age_s, dry_run),
        }
    finally:
        client.close()


def _old(created: object, age_s: float) -> bool:
    """Whether a creation time (seconds, or RFC 3339 text) lies further back than the age; unknown is not old."""
    import re
    import time
    from datetime import datetime

    if isinstance(created, int | float):
        return time.time() - created > age_s
    match = re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", str(created))
    if match is None:
        return False
    return time.time() - datetime.fromisoformat(match[0] + "+00:00").timestamp() > age_s


def _containers(client: Any, age_s: float, dry_run: bool) -> list[str]:
    from orchestrator import daemon

    def remove(ident: str) -> None:
        client.api.remove_container(ident, force=True, v=True)

    out = []
    for entry in client.api.containers(all=True, filters={"label": f"{daemon.LABEL}.run"}):
        name = entry["Id"][:12]
        running = entry.get("State") == "running"
        # Nobody waits for what an orchestrator of this host left behind when it was killed, however young it is.
        left = _orphan(str((entry.get("Labels") or {}).get(f"{daemon.LABEL}.owner", "")))
        if (left or (not running and _old(entry.get("Created"), age_s))) and (
            dry_run or _removed(name, remove, entry["Id"])
        ):
            out.append(name)
    return out


def _orphan(owner: str) -> bool:
    """Whether a container's orchestrator (`host:pid`) ran on this host and is gone."""
    import platform

    host, _, pid = owner.rpartition(":")
    return host == platform.node() and pid.isdigit() and not Path(f"/proc/{pid}").exists()


def _images(client: Any, age_s: float, dry_run: bool) -> list[str]:
    from orchestrator import daemon

    out = []
    for entry in client.api.images(filters={"label": f"{daemon.LABEL}.image"}):
        name = (entry.get("RepoTags") or [entry["Id"][:19]])[0]
        if _old(entry.get("Created"), age_s) and (dry_run or _removed(name, client.api.remove_image, entry["Id"])):
            out.append(name)
    return out


def _volumes(client: Any, age_s: float, dry_run: bool) -> list[str]:
    from orchestrator import daemon

    out = []
    for entry in client.api.volumes(filters={"label": f"{daemon.LABEL}.cache"}).get("Volumes") or []:
        name = entry["Name"]
        if _old(entry.get("CreatedAt"), age_s) and (dry_run or _removed(name, client.api.remove_volume, name)):
            out.append(name)
    return out


def _removed(name: str, remove: Callable[[str], object], ident: str) -> bool:
    """Remove one thing. What a container still uses stays, and the answer says so rather than counting it."""
    from docker.errors import APIError

    from orchestrator.commands._output import say

    try:
        remove(ident)
    except APIError as error:
        say(f"note: {name} stays: {error.explanation or error}")
        return False
    return True
