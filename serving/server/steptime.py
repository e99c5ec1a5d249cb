"""How long a decode step takes on this device, against the time its weights take to be read once.

    python -m serving.server.steptime --model examples/models/deepseek-ocr-2 --graph full --batch-sizes 1,16,96

No HTTP and no client: this is the engine's own step, whole (inputs written, decode, token chosen and read back), timed
by the wall clock, and the device time of the decode alone, timed by events: the captured step replayed back to back
over one set of inputs, nothing written or read between, first of all: the longest sequence then has `decode_context`
tokens, --context where there is one sequence (of several, those that came first are ahead). The floor counts every
weight that a step has to read (of the routed experts, those that its tokens chose) over the bandwidth of
`moegate.devices`, or --gbs; not the keys and values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moegate import devices as facts
from moegate.canonical import whole
from moegate.entry import guard
from moegate.errors import UsageError
from serving.server.settings import Settings

__all__ = ["main", "weight_bytes"]

_ROUNDS = 5


def weight_bytes(decoder: Any, batch: int, distinct_experts: int) -> int:
    """Bytes of weights that one decode step of `batch` rows reads, `distinct_experts` of each MoE layer."""
    from serving.server.weights import MlpWeights

    def size(*tensors: Any) -> int:
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    weights, spec = decoder.weights, decoder.spec
    total = size(weights.norm, weights.head) + batch * spec.hidden * weights.embed.element_size()
    for index, layer in enumerate(weights.layers):
        total += size(layer.input_norm, layer.post_norm, layer.qkv, layer.qkv_bias, layer.out, layer.out_bias)
        if isinstance(layer.mlp, MlpWeights):
            total += size(layer.mlp.gate_up, layer.mlp.down)
            continue
        prepared = decoder.prepared[index]
        total += size(prepared.w1[0], prepared.w2[0]) * distinct_experts + size(layer.mlp.router)
        if layer.mlp.shared is not None:
            total += size(layer.mlp.shared.gate_up, layer.mlp.shared.down)
    return total


def _number(text: str) -> int:
    value = whole(text, 1, 1 << 24)
    if value is None:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number from 1 to {1 << 24}")
    return value


def _numbers(text: str) -> list[int]:
    return [_number(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print one JSON document."""
    options = argparse.ArgumentParser("steptime", description=__doc__)
    add = options.add_argument
    add("--model", required=True)
    add("--dtype", default="auto")
    add("--backend", default="auto")
    add("--graph", default="full", choices=["eager", "full"])
    add("--configs", help="folder of tuned configs (default: an empty tree)")
    add("--batch-sizes", type=_numbers, default=[1])
    add("--context", type=_number, default=256, help="tokens of a sequence when its decode alone is timed")
    add("--steps", type=_number, default=50)
    add("--gbs", type=float, help="bandwidth in GB/s for the floor (default: the device table's)")
    args = options.parse_args(argv)
    settings = Settings(
        model=str(Path(args.model).resolve()),
        dtype=args.dtype,
        backend=args.backend,
        graph=args.graph,
        configs=args.configs,
        slots=max(args.batch_sizes),
        length=args.context + (args.steps + 1) * (_ROUNDS + 1) + 1,
    )
    print(json.dumps(_measure(settings, args.batch_sizes, args.context, args.steps, args.gbs), indent=1))
    return 0


def _measure(settings: Settings, sizes: Sequence[int], context: int, steps: int, gbs: float | None) -> dict[str, Any]:
    import torch

    from serving.server.worker import Worker

    try:
        worker = Worker(settings)
    except UsageError as error:
        if error.field != "length":
            raise
        raise UsageError(f"{context} tokens and {_ROUNDS + 1} times {steps} steps take {error.message}",
                         field="--context", fix="fewer of them, or fewer --steps") from None  # fmt: skip
    device = facts.find(worker.live.identity().name)
    bandwidth = gbs or (device.bandwidth_gbs if device else None)
    rows = []
    with torch.inference_mode():
        for size in sizes:
            rows.append(_one(worker, size, context, steps, bandwidth))
    info = worker.info()
    return {"device": info["device"], "versions": info["versions"], "graph": settings.graph, "gbs": bandwidth,
            "backend": info["proof"]["resolved_backend"], "context": context, "batches": rows}  # fmt: skip


def _one(worker: Any, size: int, context: int, steps: int, gbs: float | None) -> dict[str, Any]:
    """One batch size: median over rounds of the mean step."""
    from serving.server.batcher import Request

    batcher = worker.batcher
    spec = worker.spec
    total = (steps + 1) * (_ROUNDS + 1)
    if context + total > batcher.decoder.cache.length:
        raise UsageError(f"{context} + {total} tokens do not fit", field="--context")
    if context <= steps + 1:
        raise UsageError(f"{context} tokens leave no prompt before {steps} steps of warming up", field="--context",
                         fix=f"more than {steps + 1}, or fewer --steps")  # fmt: skip
    for index in range(size):
        prompt = [(index * 977 + at * 31 + 2) % spec.vocab for at in range(context - steps - 1)]
        batcher.add(Request(index, prompt, total, ignore_eos=True))
    while batcher.waiting:
        batcher.step()
    for _ in range(steps):  # compile, capture, warm up
        batcher.step()
    reached = max(request.position for request in batcher.running.values()) + 1
    alone = _decode_alone(worker, steps)
    walls, device_ms = [], []
    for _ in range(_ROUNDS):
        begin, end = worker.live.event(), worker.live.event()
        worker.live.synchronize()
        began = time.perf_counter()
        begin.record()
        for _ in range(steps):
            batcher.step()
        end.record()
        device_ms.append(begin.elapsed_ms(end) / steps)
        walls.append((time.perf_counter() - began) / steps * 1e3)
    for index in range(size):
        batcher.cancel(index)
    distinct = _distinct(spec.experts, spec.topk, size)
    read = weight_bytes(batcher.decoder, size, distinct)
    floor_ms = read / (gbs * 1e6) if gbs else None
    return {
        "batch": size,
        "step_ms": statistics.median(walls),
        "stream_ms": statistics.median(device_ms),
        "decode_ms": alone,
        "decode_context": reached,
        "weight_bytes": read,
        "distinct_experts": distinct,
        "floor_ms": floor_ms,
        "decode_floor_share": floor_ms / alone if floor_ms else None,
        "step_floor_share": floor_ms / statistics.median(walls) if floor_ms else None,
    }


def _decode_alone(worker: Any, steps: int) -> float:
    """Milliseconds of device time of the decode itself: the same step issued back to back, without reading a token."""
    batch = list(worker.batcher.running.values())
    inputs = [r.tokens[-1] for r in batch], [r.position for r in batch], [r.slot for r in batch]
    step = worker.batcher.repeat(*inputs)
    times = []
    for _ in range(_ROUNDS):
        begin, end = worker.live.event(), worker.live.event()
        worker.live.synchronize()
        begin.record()
        for _ in range(steps):
            step()
        end.record()
        times.append(begin.elapsed_ms(end) / steps)
    return statistics.median(times)


def _distinct(experts: int, topk: int, rows: int) -> int:
    """Experts that `rows` tokens are expected to choose between them, under even routing."""
    return round(experts * (1 - (1 - topk / experts) ** rows))


if __name__ == "__main__":
    guard("steptime", main)
