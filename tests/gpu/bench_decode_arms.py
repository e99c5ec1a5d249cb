"""Decode steps with untuned and with tuned configs, in one process and in turn: what tuning takes off a step.

Run on a machine with a GPU: `python tests/gpu/bench_decode_arms.py OUT.json --tuned DIR`. The engines are those of
`bench_serving.py`, without HTTP and without a client: as many slots, as many positions. For each number of sequences
and each arm: the decode replayed back to back; a decode that finds the device idle; a whole step and its parts on the
host. For the first number of sequences also the kernels inside the graph, as a profiler sees them. On a CPU the same
runs, and says nothing.
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
GAP_US = 100  # for how long the device is idle before a decode that is timed apart
PARTS = ("inputs", "replay", "argmax", "wait", "all")
WARM_UP = 8

Found = dict[str, dict[str, list[Any]]]
"""Arm -> what was timed -> its values, one per round: microseconds, or a list of PARTS."""


class Arm:
    """One engine; what is timed runs with the same inputs again and again, so that no sequence moves on."""

    def __init__(self, model: str, configs: str | None, slots: int, context: int) -> None:
        self.context, self.room = context, 2 * context + 2
        self.worker = Worker(
            Settings(model=model, backend="triton", graph="full", configs=configs, slots=slots, length=self.room)
        )
        self.batcher, self.live = self.worker.batcher, self.worker.live
        self.decode: Callable[[], torch.Tensor] = lambda: torch.empty(0)

    def begin(self, sequences: int) -> None:
        """Let that many sequences run, each with a prompt of `context` tokens."""
        for index in list(self.batcher.running):
            self.batcher.cancel(index)
        for index in range(sequences):
            prompt = [(index * 977 + at * 31 + 2) % self.worker.spec.vocab for at in range(self.context)]
            self.batcher.add(Request(index, prompt, self.room - self.context, ignore_eos=True))
        while self.batcher.waiting:
            self.batcher.step()
        for _ in range(WARM_UP if self.context > WARM_UP else 1):
            self.batcher.step()
        self.decode = self.batcher.repeat(*self.inputs())

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
        return round(float(first.elapsed_ms(last)) / count * 1e3, 2)

    def apart(self, count: int) -> float:
        """Device microseconds of a decode that finds the device idle; the median of `count`."""
        found = []
        for _ in range(count):
            self.live.synchronize()
            end = time.perf_counter() + GAP_US * 1e-6
            while time.perf_counter() < end:
                pass
            first, last = self.live.event(), self.live.event()
            first.record()
            self.decode()
            last.record()
            found.append(float(first.elapsed_ms(last)) * 1e3)
        return round(statistics.median(found), 2)

    def steps(self, count: int) -> list[float]:
        """Host microseconds of a whole step's PARTS, medians of `count`."""
        rows = [self._step() for _ in range(count)]
        return [round(statistics.median(column), 2) for column in zip(*rows, strict=True)]

    def _step(self) -> list[float]:
        stamps = [time.perf_counter()]
        step: Any = self.batcher._decode
        tokens, positions, slots = self.inputs()
        entry = step._entry(step._size(len(tokens)), step.span(positions))
        entry.inputs.fill(tokens, positions, slots)
        entry.inputs.take()
        stamps.append(time.perf_counter())
        logits = self.decode()
        stamps.append(time.perf_counter())
        best = logits[: len(tokens)].argmax(-1)
        stamps.append(time.perf_counter())
        best.tolist()
        stamps.append(time.perf_counter())
        parts = [(b - a) * 1e6 for a, b in itertools.pairwise(stamps)]
        return [*parts, sum(parts)]


def kernels(arm: Arm, count: int) -> dict[str, Any]:
    """What a profiler sees of `count` decodes: microseconds of each from start to end, and by kernel.

    Kernels that start before their predecessor ends are counted with their waiting, so that their sum exceeds a step.
    """
    from torch.profiler import ProfilerActivity, profile

    with TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(count):
                arm.decode()
            arm.live.synchronize()
        seen.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    mine = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda event: event["ts"])
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in mine:
        by_name[event["name"][:60]].append(event["dur"])
    span = mine[-1]["ts"] + mine[-1]["dur"] - mine[0]["ts"] if mine else 0.0
    rows = [{"kernel": name, "each": round(len(found) / count, 1), "us": round(statistics.median(found), 2),
             "us_of_a_step": round(sum(found) / count, 2)} for name, found in by_name.items()]  # fmt: skip
    return {"span_us": round(span / count, 1), "kernels": sorted(rows, key=lambda row: -float(row["us_of_a_step"]))}


def measure(arms: dict[str, Arm], sequences: int, count: int, rounds: int) -> Found:
    """Everything of both arms at one number of sequences, in turn: there in one round, back in the next."""
    found: Found = {name: defaultdict(list) for name in ARMS}
    for arm in arms.values():
        arm.begin(sequences)
    for number in range(rounds):
        for name in ARMS[:: 1 if number % 2 == 0 else -1]:
            found[name]["back to back"].append(arms[name].back_to_back(count))
            found[name]["apart"].append(arms[name].apart(count))
            found[name]["step"].append(arms[name].steps(count))
    return found


def say(sequences: int, found: Found) -> None:
    """A table: medians over rounds, and what the tuned arm takes less."""
    for what in found["tuned"]:
        old, new = ([row[-1] if isinstance(row, list) else row for row in found[name][what]] for name in ARMS)
        less = [a - b for a, b in zip(old, new, strict=True)]
        words = " ".join(
            f"{name} {statistics.median(values):8.1f}" for name, values in zip(ARMS, (old, new), strict=True)
        )
        spread = f"{statistics.median(less):6.1f} us ({min(less):.0f} to {max(less):.0f})"
        print(f"{sequences:3d} sequences, {what:12} {words} less {spread}")
    for name in ARMS:
        parts = [statistics.median(column) for column in zip(*found[name]["step"], strict=True)]
        print("    step", name, *(f"{part} {value:.1f}" for part, value in zip(PARTS, parts, strict=True)))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("out", type=Path)
    add("--model", default="examples/models/deepseek-ocr-2")
    add("--tuned", required=True, help="folder of tuned configs")
    add("--sequences", default="1,16,96")
    add("--context", type=int, default=128)
    add("--count", type=int, default=60)
    add("--rounds", type=int, default=4)
    args = parser.parse_args()
    sizes = [int(value) for value in args.sequences.split(",")]
    chosen = {"untuned": None, "tuned": str(Path(args.tuned).resolve())}
    with torch.inference_mode():
        model = str(Path(args.model).resolve())
        arms = {name: Arm(model, chosen[name], max(sizes), args.context) for name in ARMS}
        live = arms["tuned"].live
        body: dict[str, Any] = {
            "schema": 1, "name": "decode-arms", "device": live.identity().name, "torch": torch.__version__,
            "triton": arms["tuned"].worker.experts.caps.triton, "context": args.context, "parts": PARTS,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": "python tests/gpu/bench_decode_arms.py OUT.json --tuned kernels", "sequences": {},
        }  # fmt: skip
        for place, size in enumerate(sizes):
            found = measure(arms, size, args.count, args.rounds)
            body["sequences"][str(size)] = found
            say(size, found)
            if place == 0 and live.kind == "cuda":
                body["profiled"] = {name: kernels(arm, 12) for name, arm in arms.items()}
            args.out.write_text(json.dumps(body, indent=1) + "\n")
    for name, told in body.get("profiled", {}).items():
        rows = "; ".join(f"{row['kernel'][:18]} {row['each']:g} x {row['us']}" for row in told["kernels"][:8])
        print(f"{name}: {told['span_us']} us a decode; {rows}")


if __name__ == "__main__":
    main()
