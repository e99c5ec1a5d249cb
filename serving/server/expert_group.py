"""Expert parallelism of the server: the worker is rank 0 of a group, each further rank holds a share of the experts.

Attention, the router and the cache live on rank 0. For every MoE layer that it runs, rank 0 tells the others which
layer it is, over a socket, and all enter the exchange together. The call comes by socket and not by a collective, so
that ranks may wait for the next request for as long as nobody asks, while an exchange that has begun has a deadline.

`python -m serving.server.expert_group FD PARENT` is one further rank.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moegate.errors import InfraError, MoegateError, UsageError
from moegate.exits import Exit
from serving.lifeline import die_with_parent
from serving.ports import free_port
from serving.server.channel import Channel, pack
from serving.server.settings import Settings
from serving.server.spec import DecoderSpec, read_spec
from serving.server.weights import moe_weights, source_of
from xkernels import device as devices
from xkernels.ops.expert_parallel import EpLayout, ep_layout

__all__ = ["ExpertGroup", "join"]

EXCHANGE_S = 60.0


class ExpertGroup:
    """Rank 0's view: the processes of the other ranks and the way to call them."""

    def __init__(self, settings: Settings, spec: DecoderSpec, dtype: torch.dtype, backend: str) -> None:
        port = free_port()
        self.others = [_Rank(settings, rank, port, dtype, backend) for rank in range(1, settings.ep_size)]
        self.layout = join(0, settings, port, spec, dtype, backend)

    def call(self, layer: int) -> None:
        """Tell every other rank to enter the exchange of this layer."""
        for other in self.others:
            other.send({"layer": layer})

    def close(self) -> None:
        """Let the other ranks end, and leave the group with them: some transports wait there for every rank."""
        for other in self.others:
            other.sock.close()
        dist.destroy_process_group()
        for other in self.others:
            other.end()


class _Rank:
    """One further rank as a fresh process with a socket to it."""

    def __init__(self, settings: Settings, rank: int, port: int, dtype: torch.dtype, backend: str) -> None:
        self.rank = rank
        self.sock, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "serving.server.expert_group", str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.send({"settings": asdict(settings), "rank": rank, "port": port,
                   "dtype": str(dtype).removeprefix("torch."), "backend": backend})  # fmt: skip

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; InfraError where the rank is gone."""
        try:
            self.sock.sendall(pack(message))
        except OSError:
            raise InfraError(f"expert rank {self.rank} ended with status {self.process.poll()}") from None

    def end(self) -> None:
        """Wait for its end, which the close of its socket has asked for, then insist."""
        try:
            self.process.wait(EXCHANGE_S / 12)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def join(rank: int, settings: Settings, port: int, spec: DecoderSpec, dtype: torch.dtype, backend: str) -> EpLayout:
    """Enter the process group and build the layers' common layout.

    Raises:
        UsageError: a combination that cannot work (`EpUnsupported`). InfraError: the other ranks did not come.
    """
    live = devices.live(rank if devices.live().kind != "cpu" else 0)
    try:
        dist.init_process_group(
            live.transport, init_method=f"tcp://127.0.0.1:{port}", rank=rank,
            world_size=settings.ep_size, timeout=timedelta(seconds=EXCHANGE_S),
        )  # fmt: skip
        group = dist.group.WORLD
        assert group is not None
        return ep_layout(
            group, num_experts=spec.experts, hidden=spec.hidden, topk=spec.topk, mode=settings.ep_mode,
            backend=backend, activations=dtype, device=live.torch_device(), parts=settings.ep_parts,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error), field="ep-size") from None
    except RuntimeError as error:
        raise InfraError(f"expert rank {rank}: the group did not form: {error}") from None


def _serve(channel: Channel) -> None:
    """Hold a share of the experts and run it whenever rank 0 calls."""
    from serving.server.experts import Experts

    (first, *_) = channel.receive(wait=True)
    settings = Settings(**first["settings"])
    torch.set_num_threads(1)
    spec = read_spec(Path(settings.model))
    dtype = getattr(torch, first["dtype"])
    layout = join(first["rank"], settings, first["port"], spec, dtype, first["backend"])
    live = devices.live(first["rank"] if devices.live().kind != "cpu" else 0)
    experts = Experts(spec, dtype, live, settings.backend, settings.config_root, settings.ep_size)
    experts.share(layout, None)
    source = source_of(settings.weights, settings.seed, dtype, live.torch_device())
    with live.current(), torch.inference_mode():  # Triton starts kernels on the current device, wherever tensors live
        shares = {layer: experts.prepare(moe_weights(spec, source, layer)) for layer in sorted(spec.moe_layers)}
        x = torch.empty(0, spec.hidden, dtype=dtype, device=live.torch_device())
        weights = torch.empty(0, spec.topk, dtype=torch.float32, device=x.device)
        ids = torch.empty(0, spec.topk, dtype=torch.int32, device=x.device)
        while True:
            for message in channel.receive(wait=True):
                experts(x, shares[message["layer"]], weights, ids, message["layer"])


def main() -> int:
    """Be one further rank until rank 0 is gone; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(int(sys.argv[2]))
    try:
        _serve(Channel(int(sys.argv[1])))
    except EOFError:
        if dist.is_initialized():
            dist.destroy_process_group()
        return int(Exit.OK)
    except (MoegateError, RuntimeError) as error:
        print(f"serving.server: {error}", file=sys.stderr)
        return int(error.exit if isinstance(error, MoegateError) else Exit.INFRA)
    return int(Exit.OK)


if __name__ == "__main__":
    sys.stderr.flush()
    os._exit(main())  # the group's threads may be waiting for ranks that are gone
