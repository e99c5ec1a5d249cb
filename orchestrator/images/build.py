"""Build what is not there: one protocol, two builders, and the facts that are recorded of each image."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from moegate import canonical, spawn
from moegate.errors import InfraError
from moegate.paths import write_atomic
from moegate.records import ImageSpec
from orchestrator import daemon
from orchestrator.images import bake, classic
from orchestrator.images.preflight import local_names
from orchestrator.images.request import BuildFailure, BuildRequest, BuiltImage, request

__all__ = ["BakeBuilder", "Builder", "ClassicBuilder", "builder_for", "ensure", "labels", "write_provenance"]

_TAIL_LINES = 20
# DOCKER_HOST, DOCKER_CONTEXT, DOCKER_CONFIG, TLS settings; GitHub's build cache; the socket of a rootless daemon.
_CLIENT_ENV = ("DOCKER_", "ACTIONS_CACHE_", "ACTIONS_RUNTIME_", "ACTIONS_RESULTS_", "XDG_RUNTIME_DIR", "HOME")
# What an image is made of, asked of the image itself. Each part may be absent in an image that is not ours.
_PROBE = (
    "echo '#python'; python3 --version 2>&1; echo '#packages'; "
    "(/opt/moegate/bin/python -m pip list --format=freeze || python3 -m pip list --format=freeze) 2>/dev/null; "
    "echo '#system'; dpkg-query -W -f '${Package} ${Version}\\n' 2>/dev/null || true"
)


class Builder(Protocol):
    """A way to build images. A failure is a value: what does not depend on that image goes on."""

    name: str

    def build(self, requests: Sequence[BuildRequest], logs: Path) -> dict[str, BuildFailure | None]:
        """Build all requests, with a log each in the folder `logs`; return name -> failure, or None for success."""
        ...


def _ended(name: str, finished: spawn.Finished, log: Path, timeout_s: float) -> BuildFailure | None:
    if finished.returncode == 0 and not finished.timed_out:
        return None
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    tail = "\n".join(lines[-_TAIL_LINES:])
    if finished.timed_out:
        return BuildFailure(name, f"the build was stopped after {timeout_s:.0f} s", tail, timed_out=True)
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    return BuildFailure(name, f"the build failed: {last[:300]}", tail)


class ClassicBuilder:
    """The SDK's classic builder, one image after the other (it has no cache export, mounts or secrets)."""

    name = "classic"

    def build(self, requests: Sequence[BuildRequest], logs: Path) -> dict[str, BuildFailure | None]:
        """See Builder."""
        out: dict[str, BuildFailure | None] = {}
        for item in requests:
            out[item.name] = self._one(item, logs)
        return out

    def _one(self, item: BuildRequest, logs: Path) -> BuildFailure | None:
        log = logs / f"{bake.target_name(item.name)}.log"
        with tempfile.TemporaryDirectory(prefix="moegate-build-") as folder:
            file = Path(folder) / "request.json"
            file.write_text(
                canonical.dumps(
                    classic.document(
                        context=item.recipe.context,
                        dockerfile=item.recipe.path,
                        tag=item.tag,
                        target=item.target,
                        args=item.args,
                        labels=item.labels,
                        network=item.network,
                    )
                )
            )
            finished = spawn.run(
                [sys.executable, "-P", "-m", "orchestrator.images.classic", str(file)],
                cwd=Path(folder),
                env=_client_env(),
                stdout=log,
                stderr=log,
                timeout_s=item.timeout_s,
            )
        return _ended(item.name, finished, log, item.timeout_s)


class BakeBuilder:
    """`docker buildx bake`: all images in one call; what failed is tried alone, so that it blocks nothing else."""

    name = "bake"

    def __init__(self, docker: str = "docker") -> None:
        self._docker = docker

    def build(self, requests: Sequence[BuildRequest], logs: Path) -> dict[str, BuildFailure | None]:
        """See Builder."""
        if not requests:
            return {}
        logs.mkdir(parents=True, exist_ok=True)
        failed = self._bake(requests, logs / "bake.log")
        if failed is None or len(requests) == 1:
            return {item.name: failed for item in requests}
        return {item.name: self._bake([item], logs / f"{bake.target_name(item.name)}.log") for item in requests}

    def _bake(self, requests: Sequence[BuildRequest], log: Path) -> BuildFailure | None:
        timeout_s = max(item.timeout_s for item in requests)
        with tempfile.TemporaryDirectory(prefix="moegate-build-") as folder:
            file, metadata = Path(folder) / "bake.json", Path(folder) / "metadata.json"
            file.write_text(canonical.dumps(bake.bake_file(requests)))
            finished = spawn.run(
                bake.command(file, metadata, [item.name for item in requests], self._docker),
                cwd=Path(folder),
                env=_client_env(),
                stdout=log,
                stderr=log,
                timeout_s=timeout_s,
            )
            name = requests[0].name if len(requests) == 1 else "all"
            failure = _ended(name, finished, log, timeout_s)
            if failure is None:
                missing = {bake.target_name(item.name) for item in requests} - set(bake.read_metadata(metadata))
                if missing:
                    failure = BuildFailure(name, f"bake reported no digest for {', '.join(sorted(missing))}")
        return failure


def _client_env() -> dict[str, str]:
    """What a docker client needs to find its daemon, and the build cache; nothing else of our environment."""
    return spawn.child_env({name: value for name, value in os.environ.items() if name.startswith(_CLIENT_ENV)})


def builder_for() -> Builder:
    """Choose bake where buildx is installed, else the classic builder."""
    return BakeBuilder() if bake.available() else ClassicBuilder()


def labels(root: Path, version: str) -> dict[str, str]:
    """OCI labels of an image built from the checkout at `root`."""

    def git(*args: str) -> str:
        try:
            argv = ["git", "-C", str(root), *args]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    revision = git("rev-parse", "HEAD")
    if revision and git("status", "--porcelain", "--untracked-files=no"):
        revision += "-dirty"
    return {
        "org.opencontainers.image.created": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "org.opencontainers.image.revision": revision or "unknown",
        "org.opencontainers.image.version": version,
        f"{daemon.LABEL}.image": "1",
    }


def _image(client: Any, tag: str) -> Any | None:
    from docker.errors import ImageNotFound

    for name in local_names(tag):
        try:
            return client.images.get(name)
        except ImageNotFound:
            continue
    return None


def _contents(client: Any, image_id: str) -> tuple[str, tuple[str, ...], str]:
    """Ask an image for its Python, its Python packages and (as a digest) its system packages."""
    from docker.errors import DockerException

    probe = ["/bin/sh", "-c", _PROBE]
    try:
        output = client.containers.run(
            image_id, probe, entrypoint=[], remove=True, network_mode="none", labels={f"{daemon.LABEL}.probe": "1"}
        )
    except DockerException:  # an image without a shell says nothing of itself, and runs all the same
        return "", (), ""
    parts: dict[str, list[str]] = {}
    current: list[str] = []
    for line in bytes(output).decode(errors="replace").splitlines():
        if line.startswith("#"):
            current = parts.setdefault(line[1:], [])
        elif line:
            current.append(line)
    python = " ".join(parts.get("python", []))
    system = canonical.digest(sorted(parts.get("system", []))) if parts.get("system") else ""
    return python, tuple(sorted(parts.get("packages", []))), system


def _describe(client: Any, name: str, tag: str, image: Any, built: bool, wall_s: float) -> BuiltImage:
    python, packages, system = _contents(client, image.id)
    digests = image.attrs.get("RepoDigests") or []
    return BuiltImage(
        name=name,
        tag=tag,
        id=str(image.id),
        built=built,
        wall_s=wall_s,
        repo_digest=str(digests[0]) if digests else "",
        size_bytes=int(image.attrs.get("Size", 0)),
        python=python,
        packages=packages,
        system=system,
    )


def ensure(
    specs: Sequence[ImageSpec],
    root: Path,
    logs: Path,
    *,
    version: str,
    builder: Builder | None = None,
    timeout_s: float = 3600.0,
) -> dict[str, BuiltImage | BuildFailure]:
    """Have every image of `specs` present: referenced ones are looked up (or pulled), the others built where missing.

    Args:
        specs: images of the matrix.
        root: the project's root; Dockerfiles are relative to it.
        logs: folder for build logs.
        version: recorded as the images' version label.
        builder: default is `builder_for()`.
        timeout_s: wall clock of each build.

    Raises:
        PoolError: no daemon answers. UsageError: a Dockerfile, target or argument that does not exist.
    """
    client = daemon.connect(timeout_s=600.0)
    out: dict[str, BuiltImage | BuildFailure] = {}
    wanted: list[BuildRequest] = []
    shared = labels(root, version)
    for spec in specs:
        if spec.reference is not None:
            out[spec.name] = _referenced(client, spec.name, spec.reference)
            continue
        bare = request(spec, root)
        bases = bare.recipe.bases(bare.target, bare.args)
        local = {base: str(image.id) for base in bases if (image := _image(client, base)) is not None}
        origin = {"org.opencontainers.image.base.name": " ".join(bases)}
        item = request(spec, root, base_ids=local, labels={**shared, **origin}, timeout_s=timeout_s)
        found = _image(client, item.tag)
        if found is not None:
            out[spec.name] = _describe(client, spec.name, item.tag, found, False, 0.0)
        else:
            wanted.append(item)
    if wanted:
        began = time.monotonic()
        results = (builder or builder_for()).build(wanted, logs)
        for item in wanted:
            failure, image = results[item.name], _image(client, item.tag)
            if failure is None and image is None:
                failure = BuildFailure(item.name, f"the builder reported success, but {item.tag} is not there")
            out[item.name] = failure or _describe(client, item.name, item.tag, image, True, time.monotonic() - began)
    return out


def write_provenance(folder: Path, images: Sequence[BuiltImage]) -> Path:
    """Write what the images of a run are (ids, digests, Python and system packages) to `images.json` in a folder.

    Raises:
        InfraError: the folder cannot be written.
    """
    path = folder / "images.json"
    body = {"schema": 1, "images": [image.provenance() for image in sorted(images, key=lambda image: image.name)]}
    try:
        write_atomic(path, canonical.dumps(body) + "\n")
    except OSError as error:
        raise InfraError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def _referenced(client: Any, name: str, reference: str) -> BuiltImage | BuildFailure:
    from docker.errors import DockerException

    image = _image(client, reference)
    began = time.monotonic()
    if image is None:
        try:
            image = client.images.pull(reference)
        except DockerException as error:
            return BuildFailure(name, f"{reference} is not here and cannot be pulled: {daemon.reason(error)}")
    return _describe(client, name, reference, image, False, time.monotonic() - began)
