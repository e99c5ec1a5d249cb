"""A slowdown planted in a real Triton kernel, and whether the gate finds it; then the same matrix without it.

    python tests/gpu/planted_slowdown.py calibrate --out DIR      # what each dose costs, in one process per dose
    python tests/gpu/planted_slowdown.py find --out DIR --dose 1  # two commits, arms with `source`, `orchestrator run`

The dose is a number of loop steps too many in the up projection: loads and multiply-adds of zeros, so that results
stay equal bit by bit and only time is lost, as with a loop bound that is off by one.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KERNEL = "kernels/xkernels/ops/_details/moe_gemm.py"
MODEL = "examples/models/deepseek-ocr-2"
_LOOP = """    for step in range(steps):
        k = step * BLOCK_K
        at = x + token[:, None] * stride_xm + (k + ks)[None, :] * stride_xk
        if EVEN_K:
            a = tl.load(at, mask=valid[:, None], other=0.0)
"""
MATRIX = """\
schema: 1
name: {name}
pools: {{device: {{device: {device}, ray: none, isolation: process}}}}
models: {{model: {{config: {model}, dtype: {dtype}}}}}
arms: {{before: {{source: {before}}}, after: {{source: {after}}}}}
cells:
  - {{kind: kernel-bench, pools: device, models: model, batch_sizes: [{sizes}], graph: {graph}, timeout: 5m}}
compare: {{baseline: before, candidate: after, screen: {screen}, confirm: {confirm}, futility: none}}
gate: {{margin: {margin}, q: {q}}}
"""
_SLOW = """    for step in range(steps + {dose}):
        k = tl.where(step < steps, step, step - steps) * BLOCK_K
        at = x + token[:, None] * stride_xm + (k + ks)[None, :] * stride_xk
        if EVEN_K:
            a = tl.load(at, mask=valid[:, None] & (step < steps), other=0.0)
"""


def plant(text: str, dose: int) -> str:
    """The kernel file with `dose` steps too many; ValueError where its loop is not the one that is known here."""
    if text.count(_LOOP) != 1:
        raise ValueError("the loop of the up projection has changed: renew _LOOP")
    return text.replace(_LOOP, _SLOW.format(dose=dose)) if dose else text


def calibrate(args: argparse.Namespace) -> None:
    """Time every dose: all compile side by side, then take turns on the device, round by round."""
    scratch = Path(tempfile.mkdtemp())
    children = []
    for dose in args.doses:
        folder = scratch / f"dose-{dose}"
        shutil.copytree(ROOT / "kernels/xkernels", folder / "xkernels", ignore=shutil.ignore_patterns("__pycache__"))
        file = folder / "xkernels" / Path(KERNEL).relative_to("kernels/xkernels")
        file.write_text(plant(file.read_text(), dose))
        argv = [sys.executable, "-P", __file__, "child", "--out", str(folder), "--sizes", args.sizes,
                "--lock", str(scratch / "lock"), "--rounds", str(args.rounds)]  # fmt: skip
        children.append(subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}))
    for child in children:
        child.wait()
    rows: dict[int, dict[str, float]] = {}
    for dose in args.doses:
        rounds = [json.loads(p.read_text()) for p in sorted((scratch / f"dose-{dose}").glob("round-*.json"))]
        names = rounds[0] if rounds else {}
        rows[dose] = {name: statistics.median(r[name] for r in rounds) for name in names}
    base = rows.get(0, {})
    table = {d: {n: [round(v, 2), round(v / base[n] - 1, 4)] for n, v in row.items()} for d, row in rows.items()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "calibration.json").write_text(json.dumps(table, indent=1))
    for dose, row in table.items():
        print(dose, "  ".join(f"{n}: {v:.1f} us {100 * d:+.1f} %" for n, (v, d) in row.items()))
    shutil.rmtree(scratch)


def child(args: argparse.Namespace) -> None:
    """One dose: compile without the device to oneself, then one timing per turn."""
    from moegate.records import Measurement, read
    from tuner.commands.bench import run

    options: dict[str, Any] = {
        "model": ROOT / args.model, "shape": None, "op": "fused_experts", "dtype": "auto", "batch_sizes": args.sizes,
        "configs": "none", "backend": "triton", "graph": "full", "seed": 0, "engine": "moegate", "tp": 1, "ep": 1,
        "routing": "uniform", "as_json": False,
    }  # fmt: skip
    began = time.monotonic()
    run(**options, reps=1, out=None)
    print(f"{args.out.name}: compiled in {time.monotonic() - began:.1f} s", file=sys.stderr)
    for number in range(args.rounds):
        with args.lock.open("a") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            run(**options, reps=0, out=args.out / "one.json")
        launch = read(Measurement, args.out / "one.json").launches[0]
        values = {s.metric.removeprefix("kernel_time_"): statistics.median(s.values) for s in launch.samples}
        (args.out / f"round-{number}.json").write_text(json.dumps(values))
        time.sleep(0.05)


def find(args: argparse.Namespace) -> None:
    """Run the planted slowdown, then the same matrix with both arms on one commit; each as `orchestrator run` does."""
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch) / "repository"
        clean, slow = commits(repository, args.dose)
        runs = {}
        for name in args.runs.split(","):
            after = {"planted": slow, "unchanged": clean}[name]
            runs[name] = one_run(repository, args, name, clean, after)
            (args.out / "planted.json").write_text(json.dumps({"dose": args.dose, "runs": runs}, indent=1))
            print(f"{name}: exit {runs[name]['exit']} in {runs[name]['wall_s']} s, {runs[name]['said']}")


def commits(repository: Path, dose: int) -> tuple[str, str]:
    """A repository with this project in two commits, the second with the slowdown; their SHAs."""
    ignore = shutil.ignore_patterns("__pycache__", "runs", "*.egg-info")
    for name in ("moegate", "orchestrator", "reports", "serving", "tuner", "kernels", "examples"):
        shutil.copytree(ROOT / name, repository / name, ignore=ignore)
    shutil.copyfile(ROOT / "pyproject.toml", repository / "pyproject.toml")
    git = ["git", "-C", str(repository), "-c", "user.name=planter", "-c", "user.email=planter@example.org"]

    def commit(message: str) -> str:
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", message], check=True)
        return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()

    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    clean = commit("As it is")
    kernel = repository / KERNEL
    kernel.write_text(plant(kernel.read_text(), dose))
    return clean, commit("One step too many in the up projection")


def one_run(repository: Path, args: argparse.Namespace, name: str, before: str, after: str) -> dict[str, Any]:
    """One `orchestrator run`: its exit code and what it found."""
    from moegate.records import Comparison, read

    about = {"name": name, "before": before, "after": after, "device": args.device, "model": args.model}
    about |= {"dtype": args.dtype, "sizes": args.sizes, "graph": args.graph}
    about |= {"screen": args.screen, "confirm": args.confirm, "margin": args.margin, "q": args.q}
    matrix, out = repository / f"{name}.yaml", repository / "runs" / name
    matrix.write_text(MATRIX.format(**about))
    began = time.monotonic()
    argv = [sys.executable, "-P", "-m", "orchestrator", "run", str(matrix), "--out", str(out)]
    with (args.out / f"{name}.log").open("w") as log:
        done = subprocess.run(argv, cwd=repository, stdout=log, stderr=log, check=False)
    wall = round(time.monotonic() - began, 1)
    if not (out / "comparison.json").is_file():
        return {"exit": done.returncode, "wall_s": wall, "said": "no comparison"}
    shutil.copyfile(out / "report.html", args.out / f"{name}.html")
    cell = read(Comparison, out / "comparison.json").cells[0]
    result = json.loads(next(out.glob("cells/*/attempt-1/result.json")).read_text())
    kernels = {launch["arm"]: launch["proof"]["kernel_hash"] for launch in result["launches"]}
    gains = {stage: [round(v, 5) for v in getattr(cell, f"log_ratios_{stage}")] for stage in ("screen", "confirm")}
    effect = cell.effect
    return {
        "exit": done.returncode, "wall_s": wall, "said": f"{cell.verdict}: {cell.reason}", "verdict": cell.verdict,
        "gain": effect and [round(v, 5) for v in (effect.gain, effect.gain_low, effect.gain_high)], "p": cell.p,
        "log_ratios": gains, "kernel_hashes": kernels, "environment": result["environment"],
        "device": result["device"]["name"], "launch_s": [launch["wall_s"] for launch in result["launches"]],
    }  # fmt: skip


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("calibrate", "child", "find"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--doses", type=lambda text: [int(word) for word in text.split(",")], default=[0, 1, 2, 4])
    parser.add_argument("--sizes", default="1,16,128,1024")
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", default="planted,unchanged")
    parser.add_argument("--dose", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--graph", default="full")
    parser.add_argument("--screen", type=int, default=3)
    parser.add_argument("--confirm", type=int, default=8)
    parser.add_argument("--margin", default="1%")
    parser.add_argument("--q", default="1%")
    return parser.parse_args(argv)


def main() -> None:
    """The command line."""
    args = arguments()
    {"calibrate": calibrate, "child": child, "find": find}[args.stage](args)


if __name__ == "__main__":
    main()
