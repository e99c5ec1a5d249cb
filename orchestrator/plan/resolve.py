"""Turn names and paths of the matrix into records, and refuse what does not exist."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from moegate import canonical, families
from moegate.errors import UsageError
from moegate.paths import is_file, is_folder
from moegate.records import ArmSpec, ImageSpec, ModelSpec, PoolSpec
from orchestrator.matrix import Matrix
from orchestrator.sources import layout_of

__all__ = ["arms", "images", "models", "path_in_repository", "pools"]

GIT = "git:"


def path_in_repository(matrix: Matrix, place: tuple[str | int, ...], text: str) -> Path:
    """Resolve a path of the matrix: relative ones start at the repository's root and stay inside it."""
    path = Path(text)
    try:
        (matrix.root / path).exists()
        resolved = (matrix.root / path).resolve()
    except (OSError, RuntimeError) as error:  # too long, not to be entered, or links in a circle
        matrix.fail(place, f"{text[:80]} cannot be looked at: {getattr(error, 'strerror', error)}", "an existing path")
    if path.is_absolute():
        return path
    if not resolved.is_relative_to(matrix.root.resolve()):
        matrix.fail(
            place, f"{text} leads outside {matrix.root}", "name a path inside the repository, or an absolute one"
        )
    return resolved


def images(matrix: Matrix) -> tuple[ImageSpec, ...]:
    """The images; their Dockerfiles must exist."""
    out = []
    for name, image in matrix.spec.images.items():
        if image.dockerfile is not None:
            place = ("images", name, "dockerfile")
            if not is_file(path_in_repository(matrix, place, image.dockerfile)):
                matrix.fail(place, f"{image.dockerfile} does not exist", f"a path from {matrix.root}")
        out.append(ImageSpec(name, **image.model_dump()))
    return tuple(out)


def pools(matrix: Matrix) -> tuple[PoolSpec, ...]:
    """The pools; their images must be declared."""
    out = []
    for name, pool in matrix.spec.pools.items():
        if pool.image is not None and pool.image not in matrix.spec.images:
            known = ", ".join(matrix.spec.images) or "none is declared"
            matrix.fail(("pools", name, "image"), f"no image is called {pool.image}", f"one of images: {known}")
        if pool.isolation == "docker" and pool.image is None:
            matrix.fail(("pools", name, "isolation"), "docker needs an image", "write `image: NAME` beside it")
        out.append(PoolSpec(name, **pool.model_dump()))
    return tuple(out)


def models(matrix: Matrix) -> tuple[ModelSpec, ...]:
    """The models; their config.json must exist and be readable as a MoE model."""
    out = []
    for name, model in matrix.spec.models.items():
        place = ("models", name, "config")
        path = path_in_repository(matrix, place, model.config)
        path = families.config_file(path)
        if not is_file(path):
            matrix.fail(place, f"{model.config} does not exist", "a config.json, or the folder that holds one")
        try:
            layout = families.load_layout(path)
        except UsageError as error:
            matrix.fail(place, str(error), error.fix or "name the config.json of a MoE model")
        values: dict[str, Any] = model.model_dump()
        values |= {"config": str(path), "dtype": model.dtype or layout.dtype}
        if model.weights != "random":
            # On the pool's host, and so not looked at here; only made absolute.
            weights = Path(model.weights)
            values["weights"] = str(weights if weights.is_absolute() else (matrix.root / weights).resolve())
        out.append(ModelSpec(name, digest=canonical.file_digest(path), **values))
    return tuple(out)


def arms(matrix: Matrix) -> tuple[ArmSpec, ...]:
    """The arms; directories must exist, and git refs are pinned to the commit that they name now."""
    out = []
    for name, arm in matrix.spec.arms.items():
        place = ("arms", name, "configs")
        configs = arm.configs
        if configs.startswith(GIT):
            configs = GIT + _commit(matrix, place, configs.removeprefix(GIT))
        elif configs not in ("none", "tuned"):
            folder = path_in_repository(matrix, place, configs)
            if not is_folder(folder):
                matrix.fail(place, f"{configs} is not a folder", "none, tuned, a folder of configs, or git:REF")
            configs = str(folder)
        source = None if arm.source is None else _source(matrix, ("arms", name, "source"), arm.source)
        out.append(ArmSpec(name, configs=configs, env=dict(arm.env), source=source))
    return tuple(out)


def _source(matrix: Matrix, place: tuple[str | int, ...], ref: str) -> str:
    """The full SHA of a ref whose commit can be installed."""
    sha = _commit(matrix, place, ref)
    try:
        layout_of(matrix.root, sha)
    except UsageError as error:
        matrix.fail(place, error.message, error.fix or "a commit of this project")
    return sha


def _commit(matrix: Matrix, place: tuple[str | int, ...], ref: str) -> str:
    """The full SHA of a ref, looked up in the matrix's repository."""
    if not ref or ref.startswith("-") or any(letter in ref for letter in "\n\0 "):
        matrix.fail(place, f"{ref!r} is not a git ref", "write a branch, a tag or a SHA")
    try:
        found = subprocess.run(
            ["git", "-C", str(matrix.root), "rev-parse", "--verify", "-q", "--end-of-options", f"{ref}^{{commit}}"],
            capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        matrix.fail(place, f"git cannot be asked about {ref}: {error}", "install git, or name a directory")
    if found.returncode != 0:
        matrix.fail(place, f"no commit is called {ref} in {matrix.root}", "a branch, a tag or a SHA of this repository")
    return found.stdout.strip()
