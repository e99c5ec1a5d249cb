"""A decode step of one sequence with untuned and with tuned configs, in one process and in turn: where its time goes.

Run on a machine with a GPU: `python tests/gpu/bench_decode_arms.py OUT.json --tuned DIR`. Per arm: the decode replayed
back to back; apart, with the device idle before it; a whole step and its parts on the host, waited for as the engine
does, by asking an event, and by asking an event after a copy to pinned memory; and the kernels inside the graph as a
profiler sees them. On a CPU the same runs, and says nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from serving.server.batcher import Request
from serving.server.settings import Settings
from serving.server.worker import Worker

ARMS = ("untuned", "tuned")
WAITS = ("plain", "event", "pinned")
PAUSES = (0, 60)  # microseconds between two steps: the engine's own loop, and one that sends a token to its server
GAPS = (0, 100, 300)  # microseconds that the device is idle before a decode
PARTS = ("inputs", "replay", "argmax", "wait", "all")


class Arm:
    """One engine with `sequences` running; every step has the same inputs, so that none moves on."""

    def __init__(self, model: str, configs: str | None, sequences: int, context: int) -> None:
        room = context + 130
        self.worker = Worker(
            Settings(model=model, backend="triton", graph="full", configs=configs, slots=sequences, length=room)
        )
        self.batcher, self.live = self.worker.batcher, self.worker.live
        for index in range(sequences):
            prompt = [(index * 977 + at * 31 + 2) % self.worker.spec.vocab for at in range(context)]
            self.batcher.add(Request(index, prompt, 120, ignore_eos=True))
        while self.batcher.waiting:
            self.batcher.step()
        for _ in range(8):
            self.batcher.step()
        self.decode = self.batcher.repeat(*self.inputs())
        self.pinned = torch.zeros(sequences, dtype=torch.int64, pin_memory=self.live.kind == "cuda")

    def inputs(self) -> tuple[list[int], list[int], list[int]]:
        """Last tokens, positions and slots, as the batcher gathers them."""
        batch = list(self.batcher.running.values())
        return [r.tokens[-1] for r in batch], [r.position for r in batch], [r.slot for r in batch]

    def back_to_back(self, count: int) -> float:
        """Device microseconds of one decode of `count` that follow each other."""
        first, last = self.live.event(), self.live.event()
        self.live.synchronize()
        first.record()
        for _ in range(count):
            self.decode()
        last.record()
        return float(first.elapsed_ms(last)) / count * 1e3

    def apart(self, count: int, gap: int) -> float:
        """Device microseconds of a decode that begins `gap` microseconds after the device fell idle; the median."""
        found = []
        for _ in range(count):
            self.live.synchronize()
            _pass(gap)
            first, last = self.live.event(), self.live.event()
            first.record()
            self.decode()
            last.record()
            found.append(float(first.elapsed_ms(last)) * 1e3)
        return statistics.median(found)

    def steps(self, count: int, wait: str, pause: int) -> list[float]:
        """Host microseconds of a whole step's PARTS, medians; `pause` before each is in none of them."""
        rows = []
        for _ in range(count):
            _pass(pause)
            rows.append(self._step(wait))
        return [round(statistics.median(column), 2) for column in zip(*rows, strict=True)]

    def _step(self, wait: str) -> list[float]:
        stamps = [time.perf_counter()]
        decode: Any = self.batcher._decode
        tokens, positions, slots = self.inputs()
        entry = decode._entry(decode._size(len(tokens)), decode.span(positions))
        entry.inputs.fill(tokens, positions, slots)
        entry.inputs.take()
        stamps.append(time.perf_counter())
        logits = self.decode()
        stamps.append(time.perf_counter())
        best = logits[: len(tokens)].argmax(-1)
        stamps.append(time.perf_counter())
        self._read(best, wait if self.live.kind == "cuda" else "plain")
        stamps.append(time.perf_counter())
        parts = [(b - a) * 1e6 for a, b in itertools.pairwise(stamps)]
        return [*parts, sum(parts)]

    def _read(self, best: torch.Tensor, wait: str) -> list[int]:
        if wait == "plain":
            return list(best.tolist())
        where = best
        if wait == "pinned":
            self.pinned.copy_(best, non_blocking=True)
            where = self.pinned
        event = torch.cuda.Event()
        event.record()
        while not event.query():
            pass
        return list(where.tolist())


def _pass(microseconds: int) -> None:
    """Let time pass without giving the processor away."""
    end = time.perf_counter() + microseconds * 1e-6
    while time.perf_counter() < end:
        pass


def kernels(arm: Arm, work: Callable[[], Any], count: int) -> dict[str, Any]:
    """What a profiler sees of `count` calls: microseconds from first start to last end of each, and by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(count):
                work()
            arm.live.synchronize()
        seen.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    mine = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda event: event["ts"])
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in mine:
        by_name[event["name"][:60]].append(event["dur"])
    span = mine[-1]["ts"] + mine[-1]["dur"] - mine[0]["ts"] if mine else 0.0
    rows = [{"kernel": name, "each": len(found) / count, "us": round(statistics.median(found), 2),
             "us_of_a_step": round(sum(found) / count, 2)} for name, found in by_name.items()]  # fmt: skip
    return {"span_us": round(span / count, 1), "kernels": sorted(rows, key=lambda row: -float(row["us_of_a_step"]))}


def measure(arms: dict[str, Arm], count: int, rounds: int) -> dict[str, dict[str, list[Any]]]:
    """Everything of both arms, in turn: there in one round, back in the next."""
    found: dict[str, dict[str, list[Any]]] = {name: defaultdict(list) for name in ARMS}
    for number in range(rounds):
        for name in ARMS[:: 1 if number % 2 == 0 else -1]:
            arm, mine = arms[name], found[name]
            mine["back to back"].append(arm.back_to_back(count))
            for gap in GAPS:
                mine[f"apart {gap}"].append(arm.apart(count, gap))
            for wait in WAITS:
                for pause in PAUSES:
                    mine[f"step {wait} {pause}"].append(arm.steps(count, wait, pause))
    return found


def say(found: dict[str, dict[str, list[Any]]]) -> None:
    """A table: medians over rounds, and what the tuned arm takes less."""
    for what in found["tuned"]:
        columns = {name: [row[-1] if isinstance(row, list) else row for row in found[name][what]] for name in ARMS}
        old, new = (statistics.median(columns[name]) for name in ARMS)
        least, most = (f(a - b for a, b in zip(*columns.values(), strict=True)) for f in (min, max))
        print(f"{what:18} untuned {old:8.1f} tuned {new:8.1f} less {old - new:6.1f} us ({least:.0f} to {most:.0f})")
        if what.startswith("step"):
            for name in ARMS:
                parts = [statistics.median(column) for column in zip(*found[name][what], strict=True)]
                print("   ", name, *(f"{part} {value:.1f}" for part, value in zip(PARTS, parts, strict=True)))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("out", type=Path)
    add("--model", default="examples/models/deepseek-ocr-2")
    add("--tuned", required=True, help="folder of tuned configs")
    add("--sequences", type=int, default=1)
    add("--context", type=int, default=128)
    add("--count", type=int, default=100)
    add("--rounds", type=int, default=6)
    args = parser.parse_args()
    with torch.inference_mode():
        chosen = {"untuned": None, "tuned": str(Path(args.tuned).resolve())}
        model = str(Path(args.model).resolve())
        arms = {name: Arm(model, chosen[name], args.sequences, args.context) for name in ARMS}
        found = measure(arms, args.count, args.rounds)
        device = arms["tuned"].live
        body = {"schema": 1, "name": "decode-arms", "device": device.identity().name, "torch": torch.__version__,
                "triton": arms["tuned"].worker.experts.caps.triton,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "command": f"python tests/gpu/bench_decode_arms.py OUT.json --tuned {args.tuned}",
                "sequences": args.sequences, "context": args.context, "parts": PARTS, "found": found}  # fmt: skip
        args.out.write_text(json.dumps(body, indent=1) + "\n")
        say(found)
        if device.kind == "cuda":
            seen = {f"{name} {what}": kernels(arm, work, 12) for name, arm in arms.items()
                    for what, work in (("back to back", arm.decode), ("steps", arm.batcher.step))}  # fmt: skip
            args.out.write_text(json.dumps(body | {"profiled": seen}, indent=1) + "\n")
            for name, told in seen.items():
                print(f"{name}: {told['span_us']} us a step")
                for row in told["kernels"][:9]:
                    print(f"    {row['each']:5.1f} x {row['us']:7.2f} = {row['us_of_a_step']:7.1f}  {row['kernel']}")


if __name__ == "__main__":
    main()
