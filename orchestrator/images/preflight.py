"""Can this image be had here at all? Asked before a run, so that `isolation: auto` can say why it takes processes."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import moegate
from moegate.errors import PoolError
from moegate.records import ImageSpec
from orchestrator import daemon
from orchestrator.images.request import request

__all__ = ["local_names", "obstacle", "stale_wheel"]

_PULL_TIMEOUT_S = 15.0


def obstacle(spec: ImageSpec, root: Path) -> str | None:
    """Return why `spec` cannot be built or pulled on this host, with the fix, or None where nothing is in the way."""
    try:
        client = daemon.connect(timeout_s=_PULL_TIMEOUT_S)
    except PoolError as error:
        return str(error)
    if spec.reference is not None:
        found = _present_or_pullable(client, spec.reference)
        return None if found else f"image {spec.reference} is neither here nor pullable"
    if spec.dockerfile is None:
        return f"image {spec.name} names neither dockerfile nor reference"
    item = request(spec, root)
    recipe = item.recipe
    for base in recipe.bases(item.target, item.args):
        if not _present_or_pullable(client, base):
            fix = "make base-image" if "/" not in base else "check the name and this host's access to its registry"
            return f"the base image {base} is not here and cannot be pulled (fix: {fix})"
    if not recipe.context.is_dir():
        return f"the build context {recipe.context.name}/ is missing (fix: make wheelhouse)"
    return stale_wheel(recipe.context)


def _present_or_pullable(client: Any, name: str) -> bool:
    from docker.errors import DockerException

    for local in local_names(name):
        try:
            client.images.get(local)
        except DockerException:
            continue
        return True
    # A bare local name is never looked up elsewhere: whoever registered it there would be running in our cells.
    if "/" not in name:
        return False
    try:
        client.images.get_registry_data(name)
    except (DockerException, OSError):
        return False
    return True


def local_names(name: str) -> tuple[str, ...]:
    """What an image may be called on this host: its name, and, for `name@sha256:..`, the image of that id.

    An image that was built or imported here has no digest of a registry; its id is the digest of what it is.
    """
    digest = name.rpartition("@")[2]
    return (name, digest) if digest.startswith("sha256:") and "@" in name else (name,)


def stale_wheel(context: Path) -> str | None:
    """Return why the wheel of ours in a build context is not what runs here, or None.

    A container that runs an older build of this project than the orchestrator would measure something else.
    """
    wheels = sorted(context.rglob("moegate-*.whl"))
    if len(wheels) != 1:
        return f"{context.name}/ holds {len(wheels)} wheels of moegate, not one (fix: make wheelhouse)"
    root = Path(moegate.__file__).resolve().parent.parent
    kernels = root / "kernels"
    expected: dict[str, Path] = {}
    for package, home in (
        ("moegate", root),
        ("orchestrator", root),
        ("reports", root),
        ("serving", root),
        ("tuner", root),
        ("xkernels", kernels if kernels.is_dir() else root),
    ):
        for file in (home / package).rglob("*.py"):
            if (file.parent / "__init__.py").is_file():
                expected[file.relative_to(home).as_posix()] = file
    with zipfile.ZipFile(wheels[0]) as wheel:
        inside = {name for name in wheel.namelist() if name.endswith(".py")}
        different = sorted(inside ^ set(expected)) or sorted(
            name for name, file in expected.items() if wheel.read(name) != file.read_bytes()
        )
    if different:
        return f"the wheel in {context.name}/ is not this source tree ({different[0]} differs; fix: make wheelhouse)"
    return None
