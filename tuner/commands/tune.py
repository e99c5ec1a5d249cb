"""`tuner tune`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from moegate import canonical
from moegate.configs.names import Spelling
from moegate.errors import UsageError
from moegate.exits import Exit
from moegate.records import Case, ConfigTiming, Measurement, to_json
from tuner.commands import FEW_SIZES
from tuner.commands.common import INTERPRETED, interpreter_of, parse_budget, parse_sizes, print_json, publish
from tuner.effort import effort as effort_of
from tuner.engines import ensure_engine
from tuner.finals import Final
from tuner.model import problem_of
from tuner.pipeline import TuneOptions, TuneResult, tune
from tuner.places import ensure_apart
from tuner.prior import load as load_prior
from tuner.progress import duration
from tuner.routing.source import source_of
from tuner.strategies import strategy as strategy_of

__all__ = ["run"]


def run(*, out: Path, model: Path | None, shape: str | None, op: str, dtype: str, device: str, effort: str,
        batch_sizes: str, budget: str | None, engine: str, strategy: str, no_prior: bool, without: str, routing: str,
        ray: str | None, emit: str, tp: int, ep: int, seed: int, python: str | None, result: Path | None,
        as_json: bool) -> int:  # fmt: skip
    """Tune and write files, record and summary; the process exit code."""
    from tuner.pipeline import interpreter_env

    if device not in ("auto", "cpu"):
        raise UsageError(f"unknown device {device!r}", field="--device", fix="auto, or cpu for Triton's interpreter")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    spellings = [word.strip() for word in emit.split(",") if word.strip()]
    if unknown := [word for word in spellings if word not in get_args(Spelling)]:
        raise UsageError(f"unknown spelling {unknown[0]!r}", field="--emit", fix="sglang, or sglang,vllm")
    ensure_engine(engine)
    effort_of(effort)
    strategy_of(strategy)
    problem = problem_of(model, shape, op, dtype, engine=engine, tp=tp, ep=ep)
    sizes = parse_sizes(batch_sizes, FEW_SIZES) if interpreter_env() else parse_sizes(batch_sizes)
    if result is not None:
        ensure_apart(result, out)
    excluded = tuple(word.strip() for word in without.split(",") if word.strip())
    load_prior().without(*excluded)  # refuses what it does not hold before a child is started
    options = TuneOptions(
        problem, sizes, out, effort, engine, strategy, parse_budget(budget), not no_prior, excluded, seed,
        source_of(routing), interpreter_of(python),
        vllm="vllm" in spellings, command=("tuner", *sys.argv[1:]),
    )  # fmt: skip
    if ray is not None:
        from tuner.ray.lease import tune_on_cluster

        done = tune_on_cluster(options, ray)
    else:
        done = tune(options)
    measurement = _measurement(options, done, result)
    publish(measurement, result, False)
    if as_json:
        print_json(_summary(options, done))
    else:
        _print(options, done)
    return Exit.REGRESSION if done.failed else Exit.OK


def _measurement(options: TuneOptions, done: TuneResult, result: Path | None) -> Measurement:
    base = result.parent if result is not None else options.out
    outputs = {
        os.path.relpath(path, base): canonical.file_digest(path)
        for path in sorted(done.files)
    }  # fmt: skip
    cases = tuple(
        Case(
            f"{options.problem.op} M={final.batch_size}", "passed", "; ".join(final.notes),
            {"configs": {p: c.as_dict() for p, c in final.configs.items()}, "gain": round(final.gain, 4),
             **to_json(_timing(final))},
        )
        for final in done.finals
    )  # fmt: skip
    cases += tuple(Case(f"{options.problem.op} M={size}", "failed", why) for size, why in sorted(done.failed.items()))
    return Measurement(
        "tune", "failed" if done.failed else "ok", done.device, done.versions,
        {"evaluations": done.counts["evaluations"]}, cases=cases, outputs=outputs, interpreter=done.interpreter,
        detail=_summary(options, done),
    )  # fmt: skip


def _timing(final: Final) -> ConfigTiming:
    return ConfigTiming(
        final.winner_us, final.default_us, final.winner_spread_us, final.default_spread_us, final.verified,
        final.kept_default,
    )  # fmt: skip


def _summary(options: TuneOptions, done: TuneResult) -> dict[str, Any]:
    return {
        "op": options.problem.op,
        "problem": options.problem.as_dict(),
        "engine": options.engine,
        "effort": options.effort,
        "complete": done.complete,
        "budget_s": options.budget_s,
        "cut": {str(size): asdict(cut) for size, cut in sorted(done.cut.items())},
        "seconds": done.seconds,
        "wall_s": round(sum(done.seconds.values()), 2),
        "counts": done.counts,
        "origin": {
            "kernel_hash": done.origin.kernel_hash,
            "kernel_files": done.origin.kernel_files,
            "candidates": done.origin.candidates,
            "covered": done.origin.covered,
        },
        "errors": done.errors,
        "files": [str(path.relative_to(options.out)) for path in done.files],
        "batch_sizes": {str(final.batch_size): to_json(_timing(final)) for final in done.finals},
    }


def _print(options: TuneOptions, done: TuneResult) -> None:
    where = INTERPRETED if done.interpreter else done.device.name
    print(f"{options.problem.op} {options.problem.dtype} on {where}")
    print(f"{'M':>6} {'tuned us':>12} {'default us':>12} {'default/tuned':>13}  config")
    for final in done.finals:
        words = "; ".join(f"{p} {c.spell()}" for p, c in final.configs.items())
        mark = " (default kept)" if final.kept_default else ""
        times = f"{final.winner_us:>12.1f} {final.default_us:>12.1f} {final.gain:>13.2f}"
        print(f"{final.batch_size:>6} {times}  {words}{mark}")
    for size, why in sorted(done.failed.items()):
        print(f"{size:>6} has no config: {why}")
    for line in _cut_words(options, done):
        print(line)
    for path in done.files:
        print(f"wrote {path}")
    counts = done.counts
    print(
        f"{counts['evaluations']} configs tried, in {counts['measured']} measurements now and {counts['reused']} from "
        f"the journal, in {duration(sum(done.seconds.values()))}"
    )


def _cut_words(options: TuneOptions, done: TuneResult) -> Iterator[str]:
    """What the budget left out, so that nobody takes the table above for a whole search's."""
    if not done.cut:
        return
    budget = duration(options.budget_s or 0.0)
    yield f"the budget of {budget} cut the search short; measured of the candidates asked for:"
    for size, cut in sorted(done.cut.items()):
        counted = ", ".join(f"{p} {cut.measured[p]} of {asked}" for p, asked in cut.asked.items())
        yield f"{size:>6} {counted}" + (f"; came to: {cut.stage}" if cut.stage else "")
