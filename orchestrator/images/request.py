"""What is to be built, and the name that its content gives it.

A tag is `moegate/<image>:<digest>`, where the digest covers the Dockerfile, target, arguments, base image and every
file of the build context. The same content is therefore built once, and a cell's key never depends on a moving tag.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moegate import canonical
from moegate.errors import ImageError, UsageError
from moegate.records import ImageSpec

__all__ = ["BuildFailure", "BuildRequest", "BuiltImage", "Recipe", "read_recipe", "request"]

_ARG = re.compile(r"^ARG\s+([A-Za-z_][A-Za-z0-9_]*)(?:=(\S+))?\s*$", re.MULTILINE)
_STAGE = re.compile(r"^FROM\s+(?:--platform=\S+\s+)?(\S+)(?:\s+[Aa][Ss]\s+(\S+))?\s*$", re.MULTILINE)
_COPY = re.compile(r"^COPY\s+(?:--\S+\s+)*--from=(\S+)")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_CONTEXT = re.compile(r"^#\s*moegate-context:\s*(\S+)\s*$", re.MULTILINE)
_NETWORK = re.compile(r"^#\s*moegate-network:\s*(none|host)\s*$", re.MULTILINE)
_NAME = re.compile(r"[^a-z0-9_.-]+")


@dataclass(frozen=True)
class Recipe:
    """What a Dockerfile says of itself: its text, arguments with defaults, stages and build context.

    `context` is the folder named by a `# moegate-context: FOLDER` line, relative to the folder above the Dockerfile's;
    without such a line it is the Dockerfile's own folder. `network` is `none` or `host` where a line
    `# moegate-network: none` says so, else the builder's default.
    """

    path: Path
    text: str
    args: dict[str, str | None]
    stages: tuple[str, ...]
    context: Path
    network: str | None = None

    def bases(self, target: str | None, given: Mapping[str, str]) -> tuple[str, ...]:
        """Return the images that the build of `target` (default: the last stage) starts from, sorted.

        given: build arguments that replace the defaults.
        """
        values = {name: given.get(name, default or "") for name, default in self.args.items()}
        parts = _stages(self.text, values)
        names = [name for name, _, _ in parts]
        wanted = [names.index(target) if target in names else len(parts) - 1]
        found: set[str] = set()
        for index in wanted:  # grows while it is walked
            _, source, copies = parts[index]
            for item in (source, *copies):
                if item in names:
                    wanted += [] if names.index(item) in wanted else [names.index(item)]
                elif item != "scratch":
                    found.add(item)
        return tuple(sorted(found))


def _stages(text: str, values: Mapping[str, str]) -> list[tuple[str, str, list[str]]]:
    """Return (name, image or stage that it starts from, images or stages that it copies from) of each stage."""
    parts: list[tuple[str, str, list[str]]] = []
    for line in text.splitlines():
        if match := _STAGE.match(line):
            parts.append((match[2] or "", _VARIABLE.sub(lambda m: values.get(m[1], ""), match[1]), []))
        elif parts and (match := _COPY.match(line)):
            parts[-1][2].append(_VARIABLE.sub(lambda m: values.get(m[1], ""), match[1]))
    return parts


@dataclass(frozen=True)
class BuildRequest:
    """One image to build. `labels` take no part in the content digest; `args` hold `BASE` where it is known."""

    name: str
    recipe: Recipe
    tag: str
    digest: str
    target: str | None
    args: dict[str, str]
    labels: dict[str, str] = field(default_factory=dict)
    network: str | None = None
    timeout_s: float = 3600.0


@dataclass(frozen=True)
class BuiltImage:
    """An image that is there. `id` is the config digest, which is what a cell's key holds.

    `repo_digest` is empty for images that were never pushed or pulled. `packages` are Python's, as `name==version`;
    `system` is the sha256 of the list of system packages with their versions.
    """

    name: str
    tag: str
    id: str
    built: bool
    wall_s: float = 0.0
    repo_digest: str = ""
    size_bytes: int = 0
    python: str = ""
    packages: tuple[str, ...] = ()
    system: str = ""

    def provenance(self) -> dict[str, Any]:
        """What the image is, for the run's `images/images.json`."""
        return {**asdict(self), "packages": list(self.packages)}


@dataclass(frozen=True)
class BuildFailure:
    """An image that did not come about; only what depends on it is blocked. `tail` is the end of the build log."""

    name: str
    reason: str
    tail: str = ""
    timed_out: bool = False

    def error(self) -> ImageError:
        """The same as an exception, for callers that cannot go on."""
        return ImageError(f"image {self.name}: {self.reason}" + (f"\n{self.tail}" if self.tail else ""))


def read_recipe(path: Path) -> Recipe:
    """Read a Dockerfile.

    Raises:
        UsageError: it cannot be read, has no FROM, or names a context outside the project.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the Dockerfile: {error}", file=path) from None
    stages = _STAGE.findall(text)
    if not stages:
        raise UsageError("no FROM line", file=path, fix="name a base: FROM ${BASE}")
    root = path.resolve().parent.parent
    named = _CONTEXT.search(text)
    context = (root / named.group(1)).resolve() if named else path.resolve().parent
    if not context.is_relative_to(root):
        raise UsageError(f"the context {named.group(1) if named else context} leads outside the project", file=path)
    return Recipe(
        path=path.resolve(),
        text=text,
        args={name: default or None for name, default in _ARG.findall(text)},
        stages=tuple(name for _, name in stages if name),
        context=context,
        network=found[1] if (found := _NETWORK.search(text)) else None,
    )


def request(
    spec: ImageSpec,
    root: Path,
    *,
    base_ids: Mapping[str, str] | None = None,
    labels: dict[str, str] | None = None,
    timeout_s: float = 3600.0,
) -> BuildRequest:
    """Turn an image of the matrix into a build request.

    Args:
        spec: an image with a `dockerfile` (relative to `root`).
        root: the project's root.
        base_ids: ids of the base images that are local, so that a re-made base gives a new tag.
        labels: OCI labels and our own; not part of the digest.
        timeout_s: wall clock of the whole build.

    Raises:
        UsageError: unknown build argument or target, or no context.
    """
    if spec.dockerfile is None:
        raise UsageError(f"image {spec.name} has no dockerfile to build", field=f"images.{spec.name}.dockerfile")
    recipe = read_recipe(root / spec.dockerfile)
    args = {**spec.args, **({"BASE": spec.base} if spec.base else {})}
    _check(spec, recipe, args)
    digest = canonical.digest(
        {
            "dockerfile": hashlib.sha256(recipe.text.encode()).hexdigest(),
            "target": spec.target,
            "args": args,
            "bases": dict(base_ids or {}),
            "context": canonical.tree_digest(recipe.context) if recipe.context.is_dir() else "",
        }
    )
    name = _NAME.sub("-", spec.name.lower()).strip("-.") or "image"
    return BuildRequest(
        name=spec.name,
        recipe=recipe,
        tag=f"moegate/{name}:{digest[:16]}",
        digest=digest,
        target=spec.target,
        args=args,
        labels=dict(labels or {}),
        network=recipe.network,
        timeout_s=timeout_s,
    )


def _check(spec: ImageSpec, recipe: Recipe, args: Mapping[str, str]) -> None:
    """Raise UsageError for a build argument or target that the Dockerfile does not have."""
    for name in args:
        if name not in recipe.args:
            raise UsageError(
                f"no such build argument: {name}",
                file=recipe.path,
                field=f"images.{spec.name}.args",
                fix=", ".join(sorted(recipe.args)) or "it takes none",
            )
    if spec.target and spec.target not in recipe.stages:
        raise UsageError(
            f"no such target: {spec.target}",
            file=recipe.path,
            field=f"images.{spec.name}.target",
            fix=", ".join(recipe.stages) or "name a stage with FROM .. AS ..",
        )
