"""`python -m serving.server`: serve one model on 127.0.0.1 until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from moegate.canonical import whole
from moegate.entry import guard
from moegate.exits import Exit
from moegate.paths import config_root, write_atomic
from serving.server.link import WorkerProcess
from serving.server.settings import Settings

__all__ = ["main"]

HOST = "127.0.0.1"
_GRACE_S = 5


def _from(low: int, high: int) -> Callable[[str], int]:
    """A reader of numbers in a range: torch and the socket would refuse others much later, with a traceback."""

    def read(text: str) -> int:
        value = whole(text, low, high)
        if value is None:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number from {low} to {high}")
        return value

    return read


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not more than 0 and at most 1")
    return value


def parser() -> argparse.ArgumentParser:
    """The options. `--configs` without a value of its own follows MOEGATE_CONFIG_DIR, then the configs that we ship."""
    options = argparse.ArgumentParser("serving.server", description=__doc__)
    add = options.add_argument
    add("--model", required=True, help="folder with a Hugging Face config.json, or that file")
    add("--weights", default="random", help="`random` (seeded), or a folder with *.safetensors")
    add("--dtype", default="auto", choices=["auto", "float32", "float16", "bfloat16"])
    add("--backend", "--moe-runner-backend", default="auto", help="backend of the routed experts")
    add("--graph", default="eager", choices=["eager", "full"], help="full: decode through device graphs")
    add("--configs", help="folder of tuned configs, or `none` for an empty one")
    add("--seed", type=_from(0, (1 << 63) - 1), default=0, help="of random weights")
    add("--slots", type=_from(0, 1 << 20), default=0, help="sequences at once (default 16 on a CPU, else 128)")
    add(
        "--length",
        type=_from(0, 1 << 24),
        default=0,
        help="positions per sequence (default: the model's, at most 4096)",
    )
    add("--prefill-tokens", type=_from(1, 1 << 24), default=4096, help="rows of one prefill step")
    add("--threads", type=_from(0, 4096), default=0, help="CPU threads of the worker (default: cores less one)")
    add("--record", "--record-routing", metavar="DIR", help="keep expert choices of prefills there")
    add("--record-min-tokens", type=_from(0, 1 << 24), default=64, help="smallest prefill that is kept")
    add("--ep-size", type=int, default=1, help="processes that share the experts (expert parallelism)")
    add(
        "--ep-mode",
        default="fast",
        choices=["fast", "deterministic"],
        help="deterministic: same bits whatever the rank",
    )
    add("--ep-parts", type=int, default=1, help="2: rows of one half travel while the experts work on the other")
    add("--memory-share", type=_share, default=1.0, help="part of the device's memory that it may plan with")
    add("--max-queue", type=_from(0, 1 << 24), default=256, help="requests that may wait; more get a 503")
    add("--served-model-name", help="name in /v1/models (default: the model folder's)")
    add("--port", type=_from(0, 65535), default=0, help="0: any free port")
    add("--address-file", help="write the base URL there once the port is bound")
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    """The worker's part of the options."""
    values = {field.name: getattr(options, field.name) for field in fields(Settings)}
    values["configs"] = _configs(options.configs)
    values["model"] = str(Path(options.model).resolve())
    if options.weights != "random":
        values["weights"] = str(Path(options.weights).resolve())
    return Settings(**values)


def _configs(value: str | None) -> str | None:
    value = value or os.environ.get("MOEGATE_CONFIG_DIR")
    if value is None:
        shipped = config_root()
        return str(shipped) if shipped.is_dir() else None
    return None if value == "none" else str(Path(value).resolve())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server; returns the exit code."""
    options = parser().parse_args(argv)
    worker = WorkerProcess(settings_of(options))  # first: it imports torch while we import the rest
    try:
        return asyncio.run(_serve(options, worker))
    finally:
        worker.sock.close()
        worker.end()


async def _serve(options: argparse.Namespace, worker: WorkerProcess) -> int:
    import uvicorn

    from serving.server.app import build
    from serving.server.link import Link
    from serving.server.patience import Patience

    class Server(uvicorn.Server):
        """uvicorn, with the signals left to us: it would raise them again after its shutdown."""

        def capture_signals(self) -> contextlib.nullcontext[None]:  # type: ignore[override]
            return contextlib.nullcontext()

    # Named TCP, or asyncio would leave Nagle's algorithm on and every token would wait for an acknowledgement.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((HOST, options.port))
    except OSError as error:
        print(f"serving.server: port {options.port}: {error.strerror}", file=sys.stderr)
        return int(Exit.INFRA)
    link, patience = Link(worker), Patience()
    folder = Path(options.model)
    name = options.served_model_name or (folder.parent if folder.is_file() else folder).resolve().name
    app = patience.guard(build(link, name, options.max_queue, patience))
    server = Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", ws="none",
            timeout_graceful_shutdown=_GRACE_S, timeout_keep_alive=60,
        )
    )  # fmt: skip

    def stop() -> None:
        server.should_exit = True
        patience.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if options.address_file:
        write_atomic(Path(options.address_file), f"http://{HOST}:{sock.getsockname()[1]}\n")
    reading = asyncio.ensure_future(link.run())
    failing = asyncio.ensure_future(link.failed.wait())
    failing.add_done_callback(lambda _: stop())
    await server.serve(sockets=[sock])
    failed = link.failed.is_set()
    link.stop()
    for task in (reading, failing):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    if failed:
        print(f"serving.server: {link.message}", file=sys.stderr)
    return int(link.exit) if failed else int(Exit.OK)


if __name__ == "__main__":
    guard("serving.server", main)
