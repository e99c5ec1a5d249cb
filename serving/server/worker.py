"""The process that holds the device: `python -m serving.server.worker FD PARENT`.

It is executed anew by the HTTP process (nothing that touched a device is ever forked), takes its settings as the first
message, and ends when the other end of its socket is closed, or with the process that started it.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moegate.errors import MoegateError, UsageError
from moegate.exits import Exit
from moegate.records import Proof
from moegate.version import own_version
from serving.lifeline import die_with_parent, resident_bytes
from serving.server.channel import Channel, Message
from serving.server.settings import Settings

__all__ = ["main"]

_DTYPES = ("float32", "float16", "bfloat16")
_SLOTS = {"cpu": 16}  # every other kind of device: 128
_MAX_LENGTH = 4096
_READS_HOST = frozenset({"torch", "reference"})  # backends of the experts that no device graph can hold
_LAST_WORD_S = 2.0  # the longest that a worker which failed waits for the HTTP process to have read why


class Worker:
    """A decoder, its batcher, and the conversation with the HTTP process."""

    def __init__(self, settings: Settings) -> None:
        import torch

        from serving.server.batcher import Batcher
        from serving.server.decoder import Decoder
        from serving.server.experts import Experts
        from serving.server.fit import ensure_fits, ensure_length
        from serving.server.kvcache import KvCache
        from serving.server.recorder import Recorder
        from serving.server.spec import read_spec
        from serving.server.weights import build, source_of
        from xkernels import device as devices

        began = time.perf_counter()
        self.settings = settings
        self.live = devices.live()
        _quiet_threads(settings.threads)
        self.spec = read_spec(Path(settings.model))
        dtype = _dtype(settings.dtype, self.spec.dtype)
        where = self.live.torch_device()
        slots = settings.slots or _SLOTS.get(self.live.kind, 128)
        ensure_length(self.spec, settings.length)
        length = settings.length or min(_MAX_LENGTH, self.spec.max_positions)
        ensure_fits(self.spec, self.live, slots=slots, length=length, item=dtype.itemsize, ep=settings.ep_size,
                    share=settings.memory_share)  # fmt: skip
        self.experts = Experts(
            self.spec, dtype, self.live, settings.backend, settings.config_root, settings.ep_size
        )  # fmt: skip
        self.group = self._share_experts(dtype)
        recorder = None
        if settings.record is not None:
            recorder = Recorder(Path(settings.record), len(self.spec.moe_layers), settings.record_min_tokens)
        source = source_of(settings.weights, settings.seed, dtype, where)
        with torch.inference_mode():
            width = self.spec.kv_heads * self.spec.head_dim
            cache = KvCache(self.spec.layers, slots, length, width, dtype, where)
            decoder = Decoder(self.spec, build(self.spec, source), cache, self.experts, recorder)
            self.batcher = Batcher(decoder, settings.prefill_tokens, _decode_step(settings, decoder, self.live))
        self.live.empty_cache()
        self.live.reset_peak_memory()  # what loading took is no part of what serving takes
        self.load_s = time.perf_counter() - began
        self.step_s = 0.0

    def _share_experts(self, dtype: Any) -> Any:
        """The group of ranks that the experts are spread over, or None."""
        if self.settings.ep_size == 1:
            return None
        if self.settings.ep_size < 1 or self.settings.ep_size > self.spec.experts:
            raise UsageError(f"{self.settings.ep_size} ranks cannot share {self.spec.experts} experts", field="ep-size")
        if self.settings.graph != "eager":
            raise UsageError(
                "the exchange reads counts back to the host: no graph holds it", field="graph", fix="eager"
            )
        if self.live.kind == "cpu" and not self.experts.caps.interpreter:
            raise UsageError("the exchange's kernels need Triton", field="ep-size", fix="TRITON_INTERPRET=1 on a CPU")
        from serving.server.expert_group import ExpertGroup

        group = ExpertGroup(self.settings, self.spec, dtype, self.experts.selection.resolved)
        self.experts.share(group.layout, group.call)
        return group

    def serve(self, channel: Channel) -> None:
        """Answer messages and run steps until the HTTP process says stop or is gone."""
        import torch

        channel.send({"op": "ready", "info": self.info()})
        with torch.inference_mode():
            while True:
                for message in channel.receive(wait=not self.batcher.busy):
                    if message["op"] == "stop":
                        return
                    self._handle(channel, message)
                if not self.batcher.busy:
                    continue
                began = time.perf_counter()
                tokens = self.batcher.step()
                now = time.perf_counter()
                self.step_s += now - began
                channel.send({"op": "tokens", "at": now, "tokens": [[t.id, t.token, t.finish, t.logprob]
                                                                         for t in tokens]})  # fmt: skip

    def info(self) -> dict[str, Any]:
        """What `/v1/server_info` tells: proof, device, versions, batch sizes, memory."""
        from moegate.records import to_json

        caps = self.experts.caps
        return {
            "proof": to_json(self._proof()),
            "device": to_json(self.live.identity()),
            "versions": {
                "moegate": own_version(),
                "python": platform.python_version(),
                "torch": caps.torch or "",
                "triton": caps.triton or "",
            },
            "environment": _code_generation(),
            "interpreter": caps.interpreter,
            "batch_sizes": {str(m): n for m, n in sorted(self.batcher.sizes.items())},
            "peak_memory_bytes": self.live.peak_memory(),
            "resident_bytes": {"worker": resident_bytes()},
            "settings": asdict(self.settings),
            "dtype": str(self.batcher.decoder.weights.embed.dtype).removeprefix("torch."),
            "vocab": self.spec.vocab,
            "slots": self.batcher.decoder.cache.slots,
            "max_model_len": self.batcher.decoder.cache.length,
            "expert_parallel": self._ep_info(),
            "running": len(self.batcher.running),
            "waiting": len(self.batcher.waiting),
            "free_slots": len(self.batcher.free),
            "load_s": round(self.load_s, 3),
            "step_s": round(self.step_s, 6),
        }

    def _proof(self) -> Proof:
        """What the experts prove, and the functions of the other operators."""
        from serving.server.experts import named

        proof = self.experts.proof()
        decoder = self.batcher.decoder
        functions = {**decoder.glue.functions, **(decoder.few.functions if decoder.few is not None else {})}
        return replace(proof, functions={**proof.functions, **{op: named(f) for op, f in functions.items()}})

    def _ep_info(self) -> dict[str, Any] | None:
        if self.group is None:
            return None
        from xkernels.ops.expert_parallel import grids

        layout = self.group.layout
        wire = str(layout.wire.dtype).removeprefix("torch.")
        return {"size": layout.world, "mode": layout.mode, "wire": wire, "grids": [asdict(use) for use in grids()]}

    def _handle(self, channel: Channel, message: Message) -> None:
        from serving.server.batcher import Request

        match message["op"]:
            case "add":
                self.batcher.add(Request(**message["request"]))
            case "cancel":
                self.batcher.cancel(message["id"])
            case "info":
                channel.send({"op": "info", "info": self.info()})
            case other:
                raise ValueError(f"unknown message {other!r}")


def _decode_step(settings: Settings, decoder: Any, live: Any) -> Any:
    """The decode step of `graph: full`, or None for the eager one."""
    if settings.graph == "eager":
        return None
    resolved = decoder.experts.selection.resolved
    if live.kind != "cpu" and resolved in _READS_HOST:
        raise UsageError(f"{resolved} reads back to the host: it cannot be captured", field="graph", fix="eager")
    from serving.server.graphs import GraphedDecode

    step = GraphedDecode(decoder, live)
    if live.kind != "cpu":
        step.capture_all()
    return step


def _quiet_threads(threads: int) -> None:
    """Leave one core to HTTP and the client: their time stamps are the measurement."""
    import torch

    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) - 1))


def _dtype(request: str, model: str) -> Any:
    import torch

    name = model if request == "auto" else request
    if name not in _DTYPES:
        raise UsageError(f"{name!r} is not served", field="dtype", fix=f"auto or one of {', '.join(_DTYPES)}")
    return getattr(torch, name)


def _code_generation() -> dict[str, str]:
    """Variables that change generated code, as this process sees them."""
    prefixes = ("TRITON_", "IGC_", "SYCL_", "NEO", "AMDGCN_", "HIP_", "PYTORCH_")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def main() -> int:
    """Serve one HTTP process; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the HTTP process ends us in order
    die_with_parent(int(sys.argv[2]))
    channel = Channel(int(sys.argv[1]))
    try:
        (first, *_) = channel.receive(wait=True)
        settings = Settings(**first["settings"])
        worker = None
        try:
            worker = Worker(settings)
            worker.serve(channel)
        except (MoegateError, OSError) as error:
            code = error.exit if isinstance(error, MoegateError) else Exit.INFRA
            channel.send({"op": "failed", "exit": int(code), "message": str(error)})
            channel.linger(_LAST_WORD_S)
            return int(code)
        finally:
            if worker is not None and worker.group is not None:
                worker.group.close()
    except EOFError:
        return int(Exit.OK)
    return int(Exit.OK)


if __name__ == "__main__":
    raise SystemExit(main())
