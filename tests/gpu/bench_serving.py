"""What tuned configs are worth in serving: arm (untuned, tuned) x backend (auto, triton), measured and foretold.

Run on a machine with a GPU: `python tests/gpu/bench_serving.py OUT.json --tuned DIR`. A replicate is a fresh server per
arm and backend, all up together; the same load goes to each in turn, in ABBA order over the replicates. The unit of
replication is a server, so a replicate gives one pair per backend and load. Written anew after each replicate; it
stops before `--budget` seconds are over. Exits 1 where no pair was valid.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moegate.errors import InfraError
from moegate.records import Measurement, read
from moegate.stats import hodges_lehmann, interval, shift
from orchestrator.compare.prediction import predict
from serving.account import Account
from serving.launch import launched_from
from serving.load.bench import bench, find_model
from serving.load.client import Target
from serving.load.workload import Workload

ARMS = ("untuned", "tuned")
METRICS = ("median_tpot_ms", "output_throughput", "median_ttft_ms")
READY_S = 120.0


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("out", type=Path)
    add("--model", default="examples/models/deepseek-ocr-2")
    add("--tuned", required=True, help="folder of tuned configs")
    add("--kernel", nargs="*", default=[], help="ARM=FILE: results of `tuner bench`, for the prediction")
    add("--decode", type=Path, help="results of `bench_decode_arms.py`, for a second prediction")
    add("--backends", default="auto,triton")
    add("--graph", default="full")
    add("--concurrency", default="16,1,96", help="loads, in this order")
    add("--requests-each", default="2,2,1", help="requests per client, for each load")
    add("--input", type=int, default=128)
    add("--output", type=int, default=128)
    add("--replicates", type=int, default=6)
    add("--budget", type=float, default=600.0, help="seconds")
    add("--moe-layers", type=int, default=11)
    add("--vocab", type=int, default=512, help="prompts are drawn from ids below this")
    return parser.parse_args(argv)


def _counted(sizes: Mapping[str, int]) -> Counter[int]:
    return Counter({int(size): count for size, count in sizes.items()})


class Server:
    """One `serving launch` that stays up."""

    def __init__(self, name: tuple[str, str], argv: list[str], folder: Path) -> None:
        self.name, self.file, self.log = name, folder / "launch.json", folder / "server.log"
        folder.mkdir()
        with (folder / "launch.log").open("wb") as log:
            self.process = subprocess.Popen([*argv, f"--announce={self.file}", f"--server-log={self.log}"],
                                            stdout=log, stderr=log)  # fmt: skip

    def wait(self, deadline: float) -> None:
        """Wait until it is ready."""
        while not self.file.is_file():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise InfraError(
                    f"{self.name} is not ready: {self.log.read_text()[-1500:] if self.log.is_file() else ''}"
                )
            time.sleep(0.05)

    def load(self, workload: Workload) -> dict[str, Any]:
        """One load on it: numbers, void reason, and the batch sizes of this load alone, its warm-up not among them."""
        engine, launched = launched_from(None, self.file)
        model = find_model(launched.base_url)
        before: list[Account] = []
        measured = bench(Target(launched.base_url, model.name), workload, lambda: engine.account(launched),
                         warmed=lambda: before.append(engine.account(launched)))  # fmt: skip
        (launch,) = measured.launches
        steps = _counted(launch.batch_sizes) - _counted(before[-1].batch_sizes)
        numbers = {name: launch.detail[name] for name in METRICS if name in launch.detail}
        client = launch.detail["client"]
        numbers |= {name: client[name] for name in ("http_per_token_us", "server_median_tpot_ms", "lag_p99_ms")
                    if name in client}  # fmt: skip
        reasons = Counter(use.reason for use in launch.proof.configs) if launch.proof else Counter()
        return {"arm": self.name[0], "backend": self.name[1], "void": launch.void_reason, "numbers": numbers,
                "steps": {str(size): count for size, count in sorted(steps.items())},
                "resolved": launch.proof.resolved_backend if launch.proof else None, "reasons": dict(reasons),
                "peak_memory_bytes": launch.peak_memory_bytes, "sha256": launch.detail["requests_sha256"],
                "device": launch.device.name, "versions": measured.environment}  # fmt: skip

    def stop(self) -> None:
        """Ask the launch to end."""
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Wait for its end, and insist."""
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def in_turn(names: list[tuple[str, str]], number: int) -> list[tuple[str, str]]:
    """Who is started, and loaded, in which order: there in an even replicate, back in the next, then the next begins.

    The first of several servers is not like the others, so that no arm may always be the first.
    """
    first = number // 2 % len(names)
    turned = names[first:] + names[:first]
    return turned if number % 2 == 0 else turned[::-1]


def replicate(args: argparse.Namespace, number: int) -> list[dict[str, Any]]:
    """Fresh servers, every load on each of them."""
    names = in_turn([(arm, backend) for backend in args.backends.split(",") for arm in ARMS], number)
    loads = [int(value) for value in args.concurrency.split(",")]
    room = args.input + max(args.output, max(loads) + 2) + 2
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="moegate-2x2-")))
        servers = []
        for arm, backend in names:
            argv = [sys.executable, "-P", "-m", "serving", "launch", f"--model={args.model}", f"--graph={args.graph}",
                    f"--moe-runner-backend={backend}", f"--configs={args.tuned if arm == 'tuned' else 'none'}",
                    f"--slots={max(loads)}", f"--length={room}"]  # fmt: skip
            servers.append(Server((arm, backend), argv, folder / f"{arm}-{backend}"))
            stack.callback(servers[-1].end)
        for server in servers:  # called first, and before any of them is waited for
            stack.callback(server.stop)
        began = time.monotonic()
        for server in servers:
            server.wait(began + READY_S)
        ready = time.monotonic() - began
        each = [int(value) for value in args.requests_each.split(",")]
        for concurrency, many in zip(loads, each, strict=True):
            workload = Workload(many * concurrency, args.input, args.output, 42, args.vocab, concurrency)
            for place, server in enumerate(servers):
                rows.append({"replicate": number, "order": place, "concurrency": concurrency,
                             "ready_s": round(ready, 2), **server.load(workload)})  # fmt: skip
    return rows


def pairs_of(rows: list[dict[str, Any]], backend: str, concurrency: int, metric: str) -> list[tuple[float, float]]:
    """(untuned, tuned) per replicate, of those where both are valid."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if (row["backend"], row["concurrency"]) == (backend, concurrency) and not row["void"]:
            found.setdefault(row["replicate"], {})[row["arm"]] = row["numbers"][metric]
    return [(both["untuned"], both["tuned"]) for both in found.values() if len(both) == 2]


def gains(pairs: list[tuple[float, float]], sign: int) -> list[float]:
    """Log ratios, positive is better."""
    return [sign * math.log(new / old) for old, new in pairs]


def kernel_times(words: list[str]) -> dict[int, tuple[float, float]]:
    """Batch size -> (untuned, tuned) microseconds, medians over all files of an arm."""
    found: dict[str, dict[int, list[float]]] = {arm: {} for arm in ARMS}
    for word in words:
        arm, _, file = word.partition("=")
        for launch in read(Measurement, Path(file)).launches:
            for samples in launch.samples:
                if samples.metric.startswith("kernel_time_m"):
                    size = int(samples.metric.removeprefix("kernel_time_m"))
                    found[arm].setdefault(size, []).append(statistics.median(samples.values))
    sizes = found["untuned"].keys() & found["tuned"].keys()
    return {m: (statistics.median(found["untuned"][m]), statistics.median(found["tuned"][m])) for m in sorted(sizes)}


def decode_times(file: Path | None) -> dict[int, tuple[float, float]]:
    """Batch size -> (untuned, tuned) microseconds of a whole decode, timed in turn by `bench_decode_arms.py`."""
    if file is None:
        return {}
    found = json.loads(file.read_text())["sequences"]
    untuned, tuned = ({m: statistics.median(both[arm]["back to back"]) for m, both in found.items()} for arm in ARMS)
    return {int(m): (untuned[m], tuned[m]) for m in found}


def cell(
    rows: list[dict[str, Any]], backend: str, concurrency: int, told: Mapping[str, tuple[Any, int]]
) -> dict[str, Any]:
    """One cell of the table: each metric's gain with its interval, and the gains foretold.

    told: name -> (microseconds of both arms by batch size, how many of them a step holds). Foretold is from decode
    steps alone: what a prefill takes is in no token's time but where others wait for it.
    """
    out: dict[str, Any] = {"backend": backend, "concurrency": concurrency}
    mine = [row for row in rows if (row["backend"], row["concurrency"]) == (backend, concurrency)]
    for metric in METRICS:
        pairs = pairs_of(rows, backend, concurrency, metric)
        if not pairs:
            continue
        logs = gains(pairs, 1 if metric == "output_throughput" else -1)
        bounds = interval(logs)
        out[metric] = {"untuned": round(statistics.median(old for old, _ in pairs), 4),
                       "tuned": round(statistics.median(new for _, new in pairs), 4), "pairs": len(pairs),
                       "gain": round(math.expm1(float(hodges_lehmann(logs))), 5),
                       "low": round(math.expm1(bounds.low), 5), "high": round(math.expm1(bounds.high), 5),
                       "level": round(bounds.level, 4)}  # fmt: skip
    http = [row["numbers"]["http_per_token_us"] for row in mine if "http_per_token_us" in row["numbers"]]
    out["http_per_token_us"] = round(statistics.median(http), 2) if http else None
    out["void"] = sorted({row["void"] for row in mine if row["void"]})
    steps: Counter[int] = Counter()
    for row in mine:
        steps.update({int(size): count for size, count in row["steps"].items()})
    decodes = {size: count for size, count in steps.items() if size <= concurrency}
    for name, (times, each) in told.items():
        if times and "median_tpot_ms" in out:
            found = predict(times, decodes, layers=each, tpot_us=out["median_tpot_ms"]["untuned"] * 1e3)
            if found is not None:
                out[name] = {"gain": round(found.gain, 5), "exact": round(found.exact, 4)}
    return out


def interaction(rows: list[dict[str, Any]], backends: list[str], concurrency: int) -> dict[str, Any] | None:
    """How much more the arms differ under the second backend than under the first."""
    first, second = (gains(pairs_of(rows, b, concurrency, "median_tpot_ms"), -1) for b in backends)
    if not first or not second:
        return None
    estimate, bounds = shift(second, first)
    return {"concurrency": concurrency, "difference": round(estimate, 5), "low": round(bounds.low, 5),
            "high": round(bounds.high, 5), "level": round(bounds.level, 4)}  # fmt: skip


def report(args: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything so far, as one document."""
    backends, loads = args.backends.split(","), [int(value) for value in args.concurrency.split(",")]
    times, decodes = kernel_times(args.kernel), decode_times(args.decode)
    told = {"predicted_tpot_gain": (times, args.moe_layers), "predicted_by_decode": (decodes, 1)}
    versions = rows[0]["versions"]
    return {
        "schema": 1, "name": "serving-2x2", "device": rows[0]["device"], "torch": versions.get("torch"),
        "triton": versions.get("triton"), "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python tests/gpu/bench_serving.py {shlex.join(sys.argv[1:])}",
        "load": {"requests_each": args.requests_each, "input": args.input, "output": args.output, "graph": args.graph},
        "replicates": 1 + max(row["replicate"] for row in rows),
        "kernel_us": {str(m): [round(value, 2) for value in pair] for m, pair in times.items()},
        "decode_us": {str(m): [round(value, 2) for value in pair] for m, pair in decodes.items()},
        "cells": [cell(rows, b, c, told) for b, c in itertools.product(backends, loads)],
        "interactions": [found for c in loads if len(backends) == 2 and (found := interaction(rows, backends, c))],
        "rows": [{name: value for name, value in row.items() if name not in ("device", "versions")} for row in rows],
    }  # fmt: skip


def _say(found: dict[str, Any]) -> None:
    metric = found.get("median_tpot_ms")
    if metric is None:
        return
    low, gain, high = (f"{100 * metric[name]:+.1f} %" for name in ("low", "gain", "high"))
    print(f"{found['backend']:7} c={found['concurrency']:<3} tpot {metric['untuned']:.3f} -> {metric['tuned']:.3f} ms "
          f"{gain} [{low}, {high}] @{metric['level']} n={metric['pairs']} foretold {found.get('predicted_tpot_gain')} "
          f"by the decode {found.get('predicted_by_decode')} "
          f"http {found['http_per_token_us']} us void {found['void']}")  # fmt: skip


def main() -> int:
    """Run as many replicates as the budget holds."""
    args = options()
    began, last = time.monotonic(), 0.0
    rows: list[dict[str, Any]] = []
    for number in range(args.replicates):
        start = time.monotonic()
        if start - began + last > args.budget:  # the first one is the longest: it compiles
            break
        try:
            rows += replicate(args, number)
        except InfraError as error:
            print(error)
            continue
        last = time.monotonic() - start
        args.out.write_text(json.dumps(report(args, rows), indent=1) + "\n")
        print(f"replicate {number}: {time.monotonic() - start:.1f} s, ready after {rows[-1]['ready_s']} s", flush=True)
    if not rows:
        return 1
    told = report(args, rows)
    for found in told["cells"]:
        _say(found)
    return 0 if any("median_tpot_ms" in found for found in told["cells"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
