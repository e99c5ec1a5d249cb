"""Variants of the expert GEMMs for many rows beside the present kernels and SGLang's: right first, then times in turns.

    PYTHONPATH=.:kernels python tests/gpu/bench_large.py --out large.json

Stages, each in children with a deadline per step: compile everything at once; check every variant (errors, bits); time
what is right, all of it in turns, most interesting first; experiments on few rows in FP8; the sigmoid. A child that
dies or hangs costs the variant that it was at, and the rest goes on without it. Lines are written as they come; beside
--out, a .txt has every part of every kernel.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import large_variants as v

STEP = 14.0  # seconds of silence after which a child hangs
CHECKS = 75.0  # seconds after which no check begins again
# the smallest bf16 launches, where none of the variants is right: one k-step, a full ring, one that wraps
PROBES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("up", 64, {}), ("up", 256, {}), ("up", 320, {}), ("up", 320, {"GATHER": False, "DYNAMIC": False}),
    ("chain", 64, {}), ("chain", 640, {}),
)  # fmt: skip


def work() -> list[tuple[bool, str, str, int, Any, Any]]:
    """(SGLang's, mode, shape, tokens, up, down) of all our kernels that the run launches, each once."""
    found: list[tuple[bool, str, str, int, Any, Any]] = []
    for mode in ("bf16", "fp8"):
        for shape in v.SHAPES:
            found += [(False, mode, shape, 16, up, down) for up, down in v.variants(mode).values()]
            for m in v.TOKENS:
                found.append((False, mode, shape, 16, *v.recorded(mode, shape, m, "ours")))
    for m in v.FEW_TOKENS:
        up, down = v.recorded("fp8", "E64", m, "ours")
        found += [(False, "fp8", "E64", 16, {**up, **extra}, down) for extra in v.FEW.values()]
    return list({json.dumps(w, sort_keys=True): w for w in found}.values())


def compile_share(job: tuple[int, int]) -> tuple[int, list[str]]:
    """Compile a share of the work: ours without launching, SGLang's by running it; how many, and what failed."""
    import bench_moe as b
    from moe_problem import Problem, align
    from triton.runtime.jit import JITFunction

    share, shares = job
    theirs = [
        (True, mode, shape, few, c, c)
        for mode in ("bf16", "fp8") for shape in v.SHAPES
        for c, few in {json.dumps([c, f]): (c, f) for m in v.TOKENS for c in b.configs(mode, min(m, 4096))
                       for f in [16 if m <= 512 else 1024]}.values()
    ]  # fmt: skip
    kernels, done, failed = b.their_kernels(), 0, []
    problems: dict[tuple[str, str], Any] = {}
    launch = JITFunction.run
    for is_theirs, mode, shape, m, up, down in [*work(), *theirs][share::shares]:
        p = problems.get((mode, shape)) or problems.setdefault((mode, shape), Problem(shape, mode, 1, 2))
        data = p.inputs(m, 0)
        al = align(data[2], up["BLOCK_SIZE_M"], p.E)
        try:
            if is_theirs:
                b.their_call(kernels, p, 0, data, al, up, "chain", down)()
            else:
                JITFunction.run = lambda self, *a, **k: launch(self, *a, **{**k, "warmup": True})
                b.our_call(p, 0, data, al, up, "chain", down)()
            done += 1
        except Exception as error:
            failed.append(f"{mode} {json.dumps(up)}: {error!r}"[:250])
        finally:
            JITFunction.run = launch
    return done, failed


class Run:
    """What the stages share: the clock, and the lines kept so far."""

    def __init__(self, seconds: float, out: Path) -> None:
        self.begin, self.seconds, self.out = time.monotonic(), seconds, out
        self.lines: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def left(self) -> float:
        """Seconds until everything must be over."""
        return self.seconds - (time.monotonic() - self.begin)

    def keep(self, line: dict[str, Any]) -> None:
        """Add a line, write all of them, print the new one."""
        with self.lock:
            line["at_s"] = round(time.monotonic() - self.begin, 1)
            self.lines.append(line)
            self.out.write_text(json.dumps(self.lines, indent=1))
            if line.get("stage") == "times":
                with self.out.with_suffix(".txt").open("a") as table:
                    table.write("\n".join(v.row_text(line)) + "\n")
            for text in told(line):
                print(text, flush=True)


def told(line: dict[str, Any]) -> list[str]:
    """What is printed of a line at once."""
    stage = line.get("stage")
    if stage == "check":
        worst = max(line.get("errors", {"": 0.0}).items(), key=lambda pair: pair[1])
        found = f"worst {worst[1]:.1e} ({worst[0]}) " + " ".join(n for n, b in line.get("bits", {}).items() if b)
        word = "WRONG" if not line["right"] else "right, BITS DIFFER" if any(line["bits"].values()) else "right"
        found += "" if line["right"] else " " + json.dumps(line.get("errors", {}))
        return [f"check {line['mode']:4s} {line['name']:14s} {word} {found} {line.get('why', '')}"]
    if stage == "times":
        off = {n: x for n, x in line.get("off", {}).items() if not x < v.LIMIT[line["mode"]]}
        return [*v.short_text(line), *([f"    OFF THE PRESENT KERNEL'S RESULT: {off}"] if off else [])]
    if stage == "few":
        rows = " ".join(f"{n} {us['up']:.1f} {line['floor'] / us['up']:.3f} chain {us['chain']:.1f};"
                        for n, us in line["us"].items())  # fmt: skip
        return [f"few M={line['m']} floor {line['floor']:.1f} quantising alone {line['quantising']:.1f} | {rows}"]
    if stage == "exact":
        return [
            f"sigmoid {line['mode']} M={line['m']} up: fast {line['us']['fast']:.1f} exact {line['us']['exact']:.1f}"
        ]
    if stage == "died":
        error = [text for text in line["tail"] if "Error" in text] or line["tail"][-2:]
        return [f"died: {line['of']} {line['words'].get('mode', '')} at {line['at']}, code {line['code']}, "
                f"{line['at_s']} s", *(f"    {text}" for text in error[:2])]  # fmt: skip
    if stage == "probe":
        return [f"probe bf16 {line['part']} H={line['hidden']} {line['extra']} ended, error {line['error']:.1e}"]
    return [str(line)[:600]]


def child(run: Run, stage: str, words: dict[str, Any], step: float) -> tuple[int, str]:
    """Run a stage's child until it ends or says nothing for `step` seconds; its exit code and what it had begun."""
    argv = [sys.executable, str(Path(__file__).with_name("large_child.py")), stage, json.dumps(words)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    heard, begun, tail = [time.monotonic()], "", []

    def watch() -> None:
        while process.poll() is None:
            if time.monotonic() - heard[0] > step or run.left() < 4:
                process.kill()
                return
            time.sleep(0.2)

    threading.Thread(target=watch, daemon=True).start()
    assert process.stdout is not None
    for text in process.stdout:
        heard[0] = time.monotonic()
        if not text.startswith("@"):
            tail = [*tail[-12:], text.rstrip()[:250]]
            continue
        line = json.loads(text[1:])
        if "alive" in line:
            continue
        if "begin" in line:
            begun = line["begin"]
        else:
            run.keep(line)
    code = process.wait()
    if code:
        run.keep({"stage": "died", "of": stage, "words": words, "at": begun, "code": code, "tail": tail})
    return code, begun


def stubborn(run: Run, stage: str, words: dict[str, Any], step: float, done: Callable[[str], bool],
             until: float = math.inf) -> None:  # fmt: skip
    """A stage over `names`, started again without what it died at, as long as there is time, or until then."""
    names, lost = list(words["names"]), 0
    while lost < 2:
        names = [name for name in names if not done(name)]
        if not names or run.left() < 15 or time.monotonic() > until:
            return
        code, at = child(run, stage, {**words, "names": names}, step)
        if code == 0:
            return
        if at in names:
            names.remove(at)
        else:
            lost += 1


def checks(run: Run) -> dict[str, list[str]]:
    """Which variants of each mode are right; both modes at once."""

    def one(mode: str) -> None:
        seen = lambda name: any(x.get("name") == name and x.get("mode") == mode for x in run.lines)  # noqa: E731
        until = time.monotonic() + CHECKS
        stubborn(run, "check", {"mode": mode, "names": [*v.variants(mode), "present"]}, STEP, seen, until)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, ("bf16", "fp8")))
    good = {(x["mode"], x["name"]) for x in run.lines if x.get("stage") == "check" and x["right"]}
    return {mode: [name for name in v.variants(mode) if (mode, name) in good] for mode in ("bf16", "fp8")}


def timings(run: Run, mode: str, shape: str, right: list[str]) -> None:
    """One shape's times; without variants still the two kernels that are there."""
    names, tokens = v.timed(mode, right), list(v.TOKENS)
    for _ in range(6):
        tokens = [m for m in tokens if not any(x.get("stage") == "times" and (x["mode"], x["shape"], x["m"]) == (
            mode, shape, m) for x in run.lines)]  # fmt: skip
        if not tokens or run.left() < 20:
            return
        code, at = child(run, "times", {"mode": mode, "shape": shape, "names": names, "tokens": tokens}, STEP)
        if code == 0:
            return
        names = [name for name in names if name != at] if at in names else names[: len(names) // 2]


def compiled(run: Run, workers: int) -> None:
    """Everything compiled into the cache, by as many processes; a limit, since what is missing compiles later too."""
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        job = pool.map_async(compile_share, [(i, workers) for i in range(workers)], chunksize=1)
        try:
            answers = job.get(60)
            run.keep({"stage": "compiled", "number": sum(n for n, _ in answers), "seconds": run.seconds - run.left(),
                      "failed": [f for _, failed in answers for f in failed][:12]})  # fmt: skip
        except Exception as error:
            run.keep({"stage": "compiled", "number": -1, "why": repr(error)[:300]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=380.0, help="when everything is over")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    run = Run(args.seconds, args.out)
    compiled(run, args.workers)
    right = checks(run)
    print(
        {mode: v.timed(mode, names) for mode, names in right.items()}, f"{run.seconds - run.left():.0f} s", flush=True
    )
    if not any(name.startswith("ws") for name in right["bf16"]):
        for part, hidden, extra in PROBES:
            if run.left() > 120:
                child(run, "probe", {"part": part, "hidden": hidden, "extra": extra}, 10)
    for shape in v.SHAPES:
        for mode in ("fp8", "bf16"):
            timings(run, mode, shape, right[mode])
        if shape == v.SHAPES[0]:
            known = lambda name: any(x.get("stage") == "few" and name in x["us"] for x in run.lines)  # noqa: E731
            stubborn(run, "few", {"names": list(v.FEW)}, STEP, known)
    if run.left() > 25:
        child(run, "exact", {}, STEP)
    print(f"\n{run.seconds - run.left():.0f} s\n" + "\n".join(v.verdicts(run.lines)), flush=True)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    raise SystemExit(main())
