"""`orchestrator browse`: an index of runs on loopback, or as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("browse", epilog="Example: orchestrator browse runs/")(browse)


def browse(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="The folder that holds run directories.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = 8765,
    write: Annotated[
        bool, typer.Option("--write", help="Write RUNS/index.html and end, for any static server.")
    ] = False,
) -> None:
    """Show every run of a folder with its verdict and report. Serves on loopback until interrupted."""
    import threading
    from collections.abc import Sequence

    from moegate.paths import write_atomic
    from moegate.records import RunCard
    from orchestrator.browse import scan, server
    from orchestrator.commands._output import say
    from reports import index

    root = runs.resolve()

    def render(cards: Sequence[RunCard]) -> str:
        return index.render(cards, title=root.name)

    cards = scan(root)
    if write:
        write_atomic(root / "index.html", render(cards))
        print(root / "index.html")
        return
    with server(root, port, render) as serving:
        print(f"http://127.0.0.1:{serving.server_address[1]}/", flush=True)
        say(f"{len(cards)} run{'' if len(cards) == 1 else 's'} in {root}; Ctrl-C ends it")
        worker = threading.Thread(target=serving.serve_forever, daemon=True)
        worker.start()
        try:
            worker.join()
        except KeyboardInterrupt:
            say("ended")
        finally:
            serving.shutdown()
