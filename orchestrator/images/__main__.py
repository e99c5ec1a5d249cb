"""`python -m orchestrator.images DOCKERFILE [--target T] [--name N] [--arg K=V ...]`: build an image, print its tag."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moegate.errors import MoegateError
from moegate.exits import Exit
from moegate.records import ImageSpec
from moegate.version import own_version
from orchestrator.images import BuildFailure, ensure, obstacle


def main(argv: list[str] | None = None) -> int:
    """Build one image of this checkout; exit 3 where it cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m orchestrator.images", description=__doc__)
    parser.add_argument("dockerfile")
    parser.add_argument("--name", help="default: the Dockerfile's name (cpu.Dockerfile -> cpu)")
    parser.add_argument("--target")
    parser.add_argument("--base", help="base image (build argument BASE)")
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="a build argument")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds (default 3600)")
    options = parser.parse_args(argv)
    name = options.name or Path(options.dockerfile).name.split(".")[0]
    spec = ImageSpec(
        name=name,
        dockerfile=options.dockerfile,
        target=options.target,
        args=dict(item.split("=", 1) for item in options.arg),
        base=options.base,
    )
    root = Path.cwd()
    try:
        reason = obstacle(spec, root)
        if reason:
            print(f"image {name}: {reason}", file=sys.stderr)
            return int(Exit.INFRA)
        logs = root / ".cache" / "images"
        result = ensure([spec], root, logs, version=own_version(), timeout_s=options.timeout)[name]
    except MoegateError as error:
        print(error, file=sys.stderr)
        return int(error.exit)
    if isinstance(result, BuildFailure):
        print(f"image {name}: {result.reason}\n{result.tail}", file=sys.stderr)
        return int(Exit.INFRA)
    how = f"built in {result.wall_s:.0f} s" if result.built else "was there"
    print(f"{result.tag}  {result.id[:19]}  {result.size_bytes / 1e9:.2f} GB, {len(result.packages)} packages, {how}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
