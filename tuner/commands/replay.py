"""`tuner replay`: what a strategy would have done on a recorded sweep."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from moegate.exits import Exit
from moegate.journal import Journal
from tuner.commands.common import print_json
from tuner.effort import effort as effort_of
from tuner.journaled import PURPOSE, Journaled
from tuner.prior import load as load_prior
from tuner.replay import Recorded, Replay, load, rows_of, score, task_of
from tuner.strategies import strategy as strategy_of

__all__ = ["run"]


def run(*, journal: Path, strategy: str, effort: str, no_prior: bool, without: str, seed: int, out: Path | None,
        delay_ms: float, as_json: bool) -> int:  # fmt: skip
    """Replay and print regret and evaluations; with `out`, as a tuning that can be interrupted and gone on with."""
    recorded = load(journal)
    excluded = tuple(word.strip() for word in without.split(",") if word.strip())
    prior = None if no_prior else load_prior().without(*excluded)
    profile, searcher = effort_of(effort), strategy_of(strategy)
    if out is None:
        scored = score(recorded, searcher, prior, profile, seed)
        measured = scored.evaluations
    else:
        out.mkdir(parents=True, exist_ok=True)
        replay = Replay(recorded, delay_ms / 1e3)
        with Journal.open(out / "journal", purpose=PURPOSE) as written:
            runner = Journaled(replay, written, "replay")
            findings = searcher.tune(task_of(recorded, profile, prior, seed), runner)
            measured = runner.measured
        scored = rows_of(recorded, replay, findings)
        _write(out, recorded, findings.choices)
    document = _document(journal, strategy, effort, scored, measured)
    if as_json:
        print_json(document)
    else:
        _print(document)
    return Exit.OK


def _write(out: Path, recorded: Recorded, choices: dict[int, Any]) -> None:
    from tuner.emit import write_file

    for projection in recorded.projections:
        entries = {size: choice.configs[projection].as_dict() for size, choice in choices.items()}
        write_file(out / f"{projection}.json", entries)


def _document(journal: Path, strategy: str, effort: str, scored: Any, measured: int) -> dict[str, Any]:
    def finite(value: float) -> float | None:
        return round(value, 6) if math.isfinite(value) else None

    return {
        "journal": str(journal),
        "strategy": strategy,
        "effort": effort,
        "evaluations": scored.evaluations,
        "measured": measured,
        "visited": scored.visited,
        "share": round(scored.share, 5),
        "mean_regret": finite(scored.mean),
        "worst_regret": finite(scored.worst),
        "batch_sizes": {
            str(row.size): {
                "chosen_us": finite(row.chosen_us),
                "best_us": round(row.best_us, 3),
                "regret": finite(row.regret),
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
    worst, mean = document["worst_regret"], document["mean_regret"]
    if worst is not None:
        print(f"regret: mean {100 * mean:.3f} %, worst {100 * worst:.2f} %")
    print(
        f"{document['evaluations']} of {document['visited']} recorded evaluations ({100 * document['share']:.1f} %), "
        f"{document['measured']} of them in this process"
    )
