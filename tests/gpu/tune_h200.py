"""The tuner held to its promises on an H200: wall time, regret against an exhaustive sweep, and the old way's price.

    python tests/gpu/tune_h200.py --out DIR --dtype bfloat16 quick full exhaustive judge serial planted

Stages, each in a fresh folder: `quick`, `full` and `noprior` with cold caches (the prior leaves out sm_90),
`exhaustive` (every config of both projections with descriptors on and off; what the stages before it compiled it does
not compile again, what they chose it times too), `serial` (random configs the way SGLang's tuner visits them: compile,
then 10 x 10 graph replays, one after the other in one process, for `--serial` seconds), `planted` (configs that hang,
crash, read out of bounds, compute nonsense, exceed shared memory). With several GPUs the exhaustive sweep is dealt to
them by batch size. `judge` times what `quick` and `full` chose beside the best of the sweep (`--sweep`, or that of this
run), see `judge.py`. The regret table comes last, from the exhaustive times where there are any; `sweep.json.gz` is
what `tuner replay` reads.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(Path(__file__).parent)]

from judge import Pair, on_device, pool_of, table  # noqa: E402
from sweep_rest import HOW, Likely, Rest  # noqa: E402

from moegate.configs import BATCH_SIZES  # noqa: E402
from moegate.journal import read  # noqa: E402
from tuner.config import Config  # noqa: E402
from tuner.journaled import PURPOSE, outcome_of  # noqa: E402
from tuner.pipeline import TuneOptions, TuneResult, tune  # noqa: E402
from tuner.problem import Problem  # noqa: E402
from tuner.replay import Recorded, load  # noqa: E402
from tuner.strategies.base import Strategy, Unit  # noqa: E402

SHAPE = {"E": 64, "N": 896, "H": 1280, "topk": 6}
GROUPS = ((4096, 1, 2), (3072, 1024, 4, 8), (2048, 512, 16, 24, 32), (1536, 48, 64, 96, 128, 256))
STAGES = ("quick", "full", "noprior", "exhaustive", "judge", "serial", "planted")
_AFTER_S = 12.0  # for what comes after a sweep: collecting and the regret table
FIELDS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages", "USE_TMA")


def problem_for(dtype: str) -> Problem:
    """The measured shape: DeepSeek-OCR-2's experts."""
    block = (128, 128) if dtype == "fp8_w8a8" else None
    return Problem("fused_experts", SHAPE["E"], SHAPE["N"], SHAPE["H"], SHAPE["topk"], dtype, block)


def run_tune(args: argparse.Namespace, stage: str) -> dict[str, Any]:
    """One tuning in this process's children; wall time from here to the files."""
    effort = {"noprior": "full"}.get(stage, stage)
    sizes = tuple(int(word) for word in args.sizes.split(",")) if args.sizes else BATCH_SIZES
    sweep = stage == "exhaustive"
    seeds = seed_sweep(args, args.out / stage) if sweep else ()
    rest: Strategy | None = None
    if sweep and args.likely is not None:
        rest = Likely(load(args.likely), chosen_by(args), seconds=args.limit)
    elif sweep and args.sweep is not None:
        rest = Rest(load(args.sweep), chosen_by(args))
    options = TuneOptions(
        problem_for(args.dtype), sizes, args.out / stage, effort, engine=args.engine, prior=stage != "noprior",
        strategy="exhaustive" if sweep else "racing", without=("sm_90",), seed=args.seed, workers=args.workers,
        budget_s=args.limit if sweep else None, keep_cache=True, finals=not sweep, quiet=True,
        seeds=() if rest else seeds, searcher=rest,
    )  # fmt: skip
    began = time.monotonic()
    done = tune(options)
    wall = time.monotonic() - began
    return summary(stage, done, wall)


def seed_sweep(args: argparse.Namespace, folder: Path) -> tuple[Config, ...]:
    """Give a sweep what the tunings before it compiled; returns what they chose outside of what it visits anyway."""
    root = args.seeds or args.out
    for stage in ("quick", "full"):
        if (root / stage / "cache").is_dir():
            link_cache(root / stage / "cache", folder / "cache")
    chosen = chosen_by(args)
    found = {Config.of(config) for pairs in chosen.values() for configs in pairs.values() for config in configs}
    return tuple(sorted(config for config in found if config["GROUP_SIZE_M"] != 1))


def link_cache(source: Path, target: Path) -> None:
    """What was compiled there is compiled here too."""

    def link(one: str, other: str) -> None:
        if not Path(other).exists():
            os.link(one, other)

    shutil.copytree(source, target, copy_function=link, dirs_exist_ok=True)


def chosen_by(args: argparse.Namespace) -> dict[int, dict[str, list[Any]]]:
    """What the tunings before a sweep chose, by batch size and projection."""
    found: dict[int, dict[str, list[Any]]] = {}
    for row in tunings_before(args.seeds or args.out):
        for which in ("chosen", "finals"):
            for size, pair in row.get(which, {}).items():
                for projection, config in pair.items():
                    found.setdefault(int(size), {}).setdefault(projection, []).append(config)
    return found


def tunings_before(root: Path | None) -> list[dict[str, Any]]:
    """The results of an earlier run."""
    path = None if root is None else root / "results.json"
    return json.loads(path.read_text()) if path is not None and path.is_file() else []


def summary(stage: str, done: TuneResult, wall: float) -> dict[str, Any]:
    """What one tuning came to."""
    chosen = {
        size: {p: c.as_dict() for p, c in choice.configs.items()} for size, choice in done.findings.choices.items()
    }
    finals = {f.batch_size: {p: c.as_dict() for p, c in f.configs.items()} for f in done.finals}
    gains = [final.gain for final in done.finals]
    out = {
        "stage": stage, "wall_s": round(wall, 1), "seconds": done.seconds, "counts": done.counts, "errors": done.errors,
        "spent": done.spent, "compiled_late": done.compiled_late, "complete": done.complete, "failed": done.failed,
        "kernel_hash": done.origin.kernel_hash, "versions": done.versions,
        "tuned_us": {f.batch_size: f.winner_us for f in done.finals},
        "chosen": chosen, "finals": finals, "gains": {f.batch_size: round(f.gain, 3) for f in done.finals},
        "kept_default": [f.batch_size for f in done.finals if f.kept_default], "device": done.device.name,
        "notes": [note for f in done.finals for note in f.notes],
    }  # fmt: skip
    print(f"{stage}: {wall:.1f} s {done.seconds} {done.counts} errors {done.errors} complete {done.complete}")
    print(f"  spent {done.spent} late {done.compiled_late}", flush=True)
    if gains:
        print(
            f"  whole-op gain over default: geomean {statistics.geometric_mean(gains):.3f}, kept {out['kept_default']}"
        )
    for note in [*map(str, done.failed.items()), *out["notes"]][:10]:
        print("  note:", note[:200])
    return out


def exhaustive(args: argparse.Namespace, results: list[dict[str, Any]]) -> list[Path]:
    """The sweep on every GPU that is here, dealt by batch size; returns the journals."""
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if devices < len(GROUPS):
        results.append(run_tune(args, "exhaustive"))
        return [args.out / "exhaustive" / "journal"]
    cores = max(1, len(os.sched_getaffinity(0)) // len(GROUPS) - 2)
    children = []
    for number, group in enumerate(GROUPS):
        command = [
            sys.executable, __file__, "--out", str(args.out / f"part{number}"), "--dtype", args.dtype,
            "--sizes", ",".join(map(str, group)), "--workers", str(cores), "--limit", str(args.limit),
            "--engine", args.engine, "--seeds", str(args.out), "--part", "exhaustive",
        ]  # fmt: skip
        children.append(subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": str(number)}))
    for child in children:
        child.wait()
    return [args.out / f"part{number}" / "exhaustive" / "journal" for number in range(len(GROUPS))]


def collect(args: argparse.Namespace, journals: list[Path]) -> Recorded | None:
    """Journals to one recorded sweep, on top of the one that was completed."""
    before = load(args.sweep) if args.sweep is not None else None
    samples: dict[Unit, list[float]] = {}
    errors: dict[Unit, str] = {}
    environment: dict[str, Any] = {}
    for journal in journals:
        if not journal.is_file():
            continue
        for entry in read(journal, purpose=PURPOSE):
            if entry.kind == "environment":
                environment = entry.data
            elif entry.kind == "outcome":
                outcome = outcome_of(entry.data)
                if outcome.error is None:
                    samples.setdefault(outcome.unit, []).extend(outcome.samples_us)
                else:
                    errors[outcome.unit] = outcome.error
    if not samples:
        return None
    if before is not None:
        new = {*samples, *errors}
        samples |= {unit: [us] for unit, us in before.times.items() if unit not in new}
        errors |= {unit: error for unit, error in before.errors.items() if unit not in new}
    rows = [
        [*row(unit), round(statistics.median(times), 2), None] for unit, times in samples.items() if unit not in errors
    ]
    rows += [[*row(unit), None, error] for unit, error in errors.items()]
    about = ("device", "vendor", "device_name", "environment", "kernel_hash", "descriptors_first")
    meta = {
        **SHAPE,
        "dtype": args.dtype,
        "fields": ["M", "projection", *FIELDS, "us", "error"],
        "engine": args.engine,
        "how": HOW,
        **{name: environment.get(name) for name in about},
    }
    path = args.out / "sweep.json.gz"
    with gzip.open(path, "wt") as stream:
        json.dump({"meta": meta, "records": sorted(rows, key=str)}, stream, separators=(",", ":"))
    return load(path)


def row(unit: Unit) -> list[Any]:
    """A unit as columns."""
    return [unit.batch_size, unit.projection, *(unit.config.get(name, 0) for name in FIELDS[:-1]), int(unit.config.tma)]


def regret(recorded: Recorded, result: dict[str, Any], which: str) -> dict[int, float]:
    """Regret per batch size of a tuning's configs, from the sweep's times; a config outside the sweep is left out."""
    out = {}
    for size in recorded.sizes:
        pair = result[which].get(size) or result[which].get(str(size))
        if pair is None:
            continue
        times = [recorded.times.get(Unit(size, p, Config.of(pair[p]))) for p in recorded.projections]
        if all(time is not None for time in times):
            out[size] = sum(t for t in times if t is not None) / recorded.best(size) - 1
    return out


def serial(args: argparse.Namespace) -> dict[str, Any]:
    """Random configs one after the other in one process that compiles them too, 10 x 10 graph replays each."""
    from tuner.child.session import Session
    from tuner.spaces import space_for

    os.environ["TRITON_CACHE_DIR"] = str(args.out / "serial-cache")
    problem = problem_for(args.dtype)
    session = Session()
    session.do_setup(args.engine, problem.as_dict(), 0, 10)
    configs = random.Random(0).sample(space_for(problem.op, "nvidia").configs(problem), 40)
    drawn = [(config, random.Random(number).choice(BATCH_SIZES)) for number, config in enumerate(configs)]
    began, failed, done = time.monotonic(), 0, 0
    for config, size in drawn:
        if time.monotonic() - began > args.serial:
            break
        for projection in ("up", "down"):
            try:
                session.do_measure(size, projection, config.as_dict(), 10)  # type: ignore[arg-type]
            except Exception:
                failed += 1
        done += 1
    each = (time.monotonic() - began) / done
    total = each * 1920 * len(BATCH_SIZES)
    print(
        f"serial: {done} configs, {each:.2f} s a config of both projections, {failed} failed; "
        f"1920 configs x 18 sizes: {total / 3600:.1f} h", flush=True
    )  # fmt: skip
    return {"stage": "serial", "configs": done, "seconds_each": each, "failed": failed, "extrapolated_s": total}


def judged(
    args: argparse.Namespace, recorded: Recorded | None, results: list[dict[str, Any]]
) -> dict[str, Any]:  # fmt: skip
    """What the tunings chose, timed beside the sweep's best on this machine."""
    finals: dict[str, dict[Any, Any]] = {row["stage"]: row["finals"] for row in results if row.get("finals")}
    sizes = sorted({int(size) for found in finals.values() for size in found})
    pools = []
    for size in sizes:
        chosen: dict[str, Pair] = {
            stage: {p: Config.of(config) for p, config in found.get(size, found.get(str(size), {})).items()}
            for stage, found in finals.items()
        }
        pools.append(pool_of(size, {stage: pair for stage, pair in chosen.items() if pair}, recorded))
    folder = args.out / "judge"
    folder.mkdir(exist_ok=True)
    for root in dict.fromkeys((args.seeds or args.out, args.out)):
        for stage in ("quick", "full", "exhaustive"):
            if (root / stage / "cache").is_dir():
                link_cache(root / stage / "cache", folder / "cache")
    verdicts = on_device(problem_for(args.dtype), args.engine, folder, pools, args.judge)
    print("\n".join(table(verdicts, tuple(finals))), flush=True)
    return {**json.loads((folder / "judge.json").read_text()), "sweep": recorded is not None}


def planted(args: argparse.Namespace) -> dict[str, Any]:
    """Bad configs, for real."""
    from tuner.child.client import ChildSpec
    from tuner.live import Live, LiveOptions
    from tuner.strategies.base import Request, measure

    fp8 = args.dtype == "fp8_w8a8"
    problem = Problem("fused_experts", 8, 512, 512, 2, args.dtype, (128, 128) if fp8 else None)
    spec = ChildSpec(
        args.out / "planted",
        env={"TRITON_CACHE_DIR": str(args.out / "planted" / "cache"), "PYTHONPATH": str(Path(__file__).parent)},
    )
    live = Live(spec, problem, LiveOptions("planted_gpu:make", routes=2, workers=4, deadline_s=4.0))
    tile = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128 if fp8 else 64}
    good = {**tile, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
    wide = {**good, "BLOCK_SIZE_M": 256, "BLOCK_SIZE_N": 256}
    over = {**wide, "BLOCK_SIZE_K": 128 if fp8 else 256, "num_warps": 8, "num_stages": 5}
    spill = {**wide, "BLOCK_SIZE_M": 128 if fp8 else 256, "num_stages": 2}
    compiled = [Request(Unit(64, "up", Config.of(case)), 99, 1) for case in (good, over, spill)]
    cases = [good, {**good, "FAULT": "hang"}, good, {**good, "FAULT": "segfault"}, {**good, "FAULT": "illegal"}, good,
             {**good, "FAULT": "wrong"}, over, spill, good]  # fmt: skip
    found = []
    try:
        measure(live, compiled)  # side by side
        for number, case in enumerate(cases):
            outcome = measure(live, [Request(Unit(64, "up", Config.of(case)), number, 3)])[0]
            name = case.get("FAULT", Config.of(case).spell())
            found.append([name, outcome.error, outcome.median_us, outcome.reason[:100]])
            print("planted:", *found[-1], flush=True)
    finally:
        live.close()
    return {"stage": "planted", "cases": found, "starts": live.worker.starts}


def report(args: argparse.Namespace, recorded: Recorded | None, results: list[dict[str, Any]]) -> None:
    """The table that matters, last."""
    if recorded is None:
        return
    print(f"sweep: {recorded.visited} visited, {len(recorded.times)} ran, sizes {recorded.sizes}")
    for result in results:
        if "chosen" not in result:
            continue
        for which in ("chosen", "finals"):
            found = regret(recorded, result, which)
            if found:
                worst = max(found, key=lambda size: found[size])
                print(
                    f"{result['stage']} {which}: wall {result['wall_s']} s, "
                    f"mean regret {100 * statistics.fmean(found.values()):.3f} %, "
                    f"worst {100 * found[worst]:.2f} % at M={worst}, {len(found)} sizes"
                )


def main() -> None:
    """Run the stages that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine", default="moegate")
    parser.add_argument("--sizes", default="")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--limit", type=float, default=540.0)
    parser.add_argument("--total", type=float, default=3600.0, help="Seconds for everything: cuts the sweep short.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", action="store_true")
    parser.add_argument("--seeds", type=Path, default=None, help="Where the tunings before a sweep lie.")
    parser.add_argument("--serial", type=float, default=40.0, help="Seconds for the serial way.")
    parser.add_argument("--judge", type=float, default=60.0, help="Seconds for the judge.")
    parser.add_argument("--likely", type=Path, default=None, help="Another dtype's sweep, to begin with its best.")
    parser.add_argument("--shape", default="", help="As `tuner tune --shape` takes it, for another than the model's.")
    parser.add_argument("--sweep", type=Path, default=None, help="A recorded sweep to hold the tunings against.")
    args = parser.parse_args()
    if args.shape:
        SHAPE.update({name: int(value) for name, value in (part.split("=") for part in args.shape.split(","))})
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    results = tunings_before(args.seeds)
    recorded = load(args.sweep) if args.sweep is not None else None
    for stage in args.stages:
        try:
            if stage == "exhaustive" and not args.part:
                args.limit = min(args.limit, args.total - (time.monotonic() - began) - _AFTER_S)
                recorded = collect(args, exhaustive(args, results))
            elif stage == "judge":
                results.append(judged(args, recorded, results))
            else:
                results.append({"serial": serial, "planted": planted}.get(stage, partial(run_tune, stage=stage))(args))
        except Exception:  # one stage that fails does not lose the others
            traceback.print_exc()
        (args.out / "results.json").write_text(json.dumps(results, indent=1))
        print(f"after {stage}: {time.monotonic() - began:.1f} s", flush=True)
    report(args, recorded, results)


if __name__ == "__main__":
    main()
