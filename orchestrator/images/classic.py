"""The SDK's classic builder, as a program of its own: `python -m orchestrator.images.classic REQUEST.json`.

The library has no wall-clock limit for a build, only one for silence. As a child process it gets a hard one: the
daemon cancels a classic build when its client goes away. Progress goes to standard output; exit 1 is a failed build.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from moegate import canonical
from moegate.errors import MoegateError
from orchestrator import daemon

__all__ = ["document", "main"]

_FIELDS = ("context", "dockerfile", "tag", "target", "args", "labels", "network")


def document(
    *,
    context: Path,
    dockerfile: Path,
    tag: str,
    target: str | None,
    args: dict[str, str],
    labels: dict[str, str],
    network: str | None,
) -> dict[str, Any]:
    """Return the request file's content."""
    return {
        "context": str(context),
        "dockerfile": str(dockerfile),
        "tag": tag,
        "target": target,
        "args": args,
        "labels": labels,
        "network": network,
    }


def _build(request: dict[str, Any]) -> int:
    client = daemon.connect(timeout_s=None)
    lines = client.api.build(
        path=request["context"],
        dockerfile=request["dockerfile"],
        tag=request["tag"],
        target=request["target"],
        buildargs=request["args"],
        labels=request["labels"],
        network_mode=request["network"],
        rm=True,
        forcerm=True,
        decode=True,
    )
    for line in lines:
        if "error" in line:
            print(str(line["error"]).strip(), flush=True)
            return 1
        text = str(line.get("stream") or line.get("status") or "").rstrip()
        if text:
            print(text, flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Build one image; the only argument is the request file."""
    (path,) = sys.argv[1:] if argv is None else argv
    request = canonical.load_json(Path(path))
    if not isinstance(request, dict) or set(request) != set(_FIELDS):
        print(f"{path}: not a build request", file=sys.stderr)
        return 2
    try:
        return _build(request)
    except MoegateError as error:
        print(error, file=sys.stderr)
        return int(error.exit)
    except Exception as error:
        # Whatever the library raises here is the daemon's or the connection's, and the last line of the build log.
        print(daemon.reason(error), flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
