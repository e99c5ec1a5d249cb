"""`tuner replay`: what a strategy would have done on a recorded sweep."""

from __future__ import annotations

import math
import os
import statistics
from pathlib import Path
from typing import Any

from moegate import canonical
from moegate.errors import UsageError
from moegate.exits import Exit
from moegate.journal import Journal
from tuner.commands.common import print_json
from tuner.effort import Effort
from tuner.effort import effort as effort_of
from tuner.journaled import PURPOSE, Journaled
from tuner.noisy import Noise, noisy_score
from tuner.places import JOURNAL, ensure_place
from tuner.prior import Prior
from tuner.prior import load as load_prior
from tuner.problem import Projection
from tuner.replay import Recorded, Replay, load, rows_of, score, task_of
from tuner.strategies import strategy as strategy_of
from tuner.strategies.base import Strategy

__all__ = ["run"]

_MOST_SEEDS, _MOST_DELAY_MS = 1000, 60_000
_FIX = "name a folder of its own"


def run(*, journal: Path, strategy: str, effort: str, no_prior: bool, without: str, seed: int, out: Path | None,
        delay_ms: float, noise: int, as_json: bool) -> int:  # fmt: skip
    """Replay and print regret and evaluations; with `out`, as a tuning that can be interrupted and gone on with.

    noise: also search under noise and play the finals, once for each of so many seeds.

    Raises:
        UsageError: the recording cannot be read, or there is no such strategy, effort or number of seeds.
    """
    if not 0 <= noise <= _MOST_SEEDS:
        raise UsageError(f"must be 0 or more, and at most {_MOST_SEEDS}, not {noise}", field="--noise")
    if not 0 <= delay_ms <= _MOST_DELAY_MS:
        raise UsageError(f"must be between 0 and {_MOST_DELAY_MS}, not {delay_ms:g}", field="--delay-ms")
    recorded = load(journal)
    excluded = tuple(word.strip() for word in without.split(",") if word.strip())
    prior = None if no_prior else load_prior().without(*excluded)
    profile, searcher = effort_of(effort), strategy_of(strategy)
    if out is None:
        scored = score(recorded, searcher, prior, profile, seed)
        measured = scored.evaluations
    else:
        _ensure_own(out, journal, recorded)
        replay = Replay(recorded, delay_ms / 1e3)
        with Journal.open(out / JOURNAL, purpose=PURPOSE) as written:
            if any(written.of("environment")):
                raise UsageError("is the journal of a tuning on a device", file=written.path, field="--out", fix=_FIX)
            # Answers of another recording are not this one's.
            runner = Journaled(replay, written, f"replay {canonical.file_digest(journal)[:16]}")
            findings = searcher.tune(task_of(recorded, profile, prior, seed), runner)
            measured = runner.measured
        scored = rows_of(recorded, replay, findings)
        _write(out, recorded, findings.choices)
    document = _document(journal, strategy, effort, scored, measured)
    document["under_noise"] = _under_noise(recorded, searcher, prior, profile, noise) if noise else None
    if as_json:
        print_json(document)
    else:
        _print(document)
    return Exit.OK


def _ensure_own(out: Path, journal: Path, recorded: Recorded) -> None:
    """Refuse a folder that cannot take the journal and the configs, or that holds the recording itself."""
    if os.path.realpath(out / JOURNAL) == os.path.realpath(journal):
        raise UsageError("holds the recording that is replayed", file=out, field="--out", fix=_FIX)
    ensure_place(out / JOURNAL)
    for path in _config_files(out, recorded).values():
        ensure_place(path)


def _config_files(out: Path, recorded: Recorded) -> dict[Projection, Path]:
    return {projection: out / f"{projection}.json" for projection in recorded.projections}


def _under_noise(
    recorded: Recorded, searcher: Strategy, prior: Prior | None, profile: Effort, seeds: int
) -> dict[str, Any]:
    scores = [noisy_score(recorded, searcher, prior, profile, Noise(seed=seed)) for seed in range(seeds)]
    return {
        "seeds": seeds,
        "mean_regret": _finite(statistics.fmean(score.mean for score in scores)),
        "worst_regret": _finite(max(score.worst for score in scores)),
    }


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _write(out: Path, recorded: Recorded, choices: dict[int, Any]) -> None:
    from tuner.emit import write_file

    for projection, path in _config_files(out, recorded).items():
        write_file(path, {size: choice.configs[projection].as_dict() for size, choice in choices.items()})


def _document(journal: Path, strategy: str, effort: str, scored: Any, measured: int) -> dict[str, Any]:
    return {
        "journal": str(journal),
        "strategy": strategy,
        "effort": effort,
        "evaluations": scored.evaluations,
        "measured": measured,
        "visited": scored.visited,
        "share": round(scored.share, 5),
        "mean_regret": _finite(scored.mean),
        "worst_regret": _finite(scored.worst),
        "batch_sizes": {
            str(row.size): {
                "chosen_us": _finite(row.chosen_us),
                "best_us": round(row.best_us, 3),
                "regret": _finite(row.regret),
                "evaluations": row.asked,
            }
            for row in scored.rows
        },
    }


def _print(document: dict[str, Any]) -> None:
    print(f"{'M':>6} {'chosen us':>10} {'best us':>10} {'regret':>8} {'tried':>6}")
    for size, row in document["batch_sizes"].items():
        regret = "none" if row["regret"] is None else f"{100 * row['regret']:.2f} %"
        chosen = "-" if row["chosen_us"] is None else f"{row['chosen_us']:.1f}"
        print(f"{size:>6} {chosen:>10} {row['best_us']:>10.1f} {regret:>8} {row['evaluations']:>6}")
    _print_regret("regret", document)
    if document["under_noise"] is not None:
        _print_regret(f"under noise, over {document['under_noise']['seeds']} seeds", document["under_noise"])
    print(
        f"{document['evaluations']} of {document['visited']} recorded evaluations ({100 * document['share']:.1f} %), "
        f"{document['measured']} of them in this process"
    )


def _print_regret(words: str, found: dict[str, Any]) -> None:
    mean, worst = found["mean_regret"], found["worst_regret"]
    if worst is not None:
        print(f"{words}: mean {100 * mean:.3f} %, worst {100 * worst:.2f} %")
