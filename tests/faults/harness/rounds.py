"""Rounds: one run each, hit a few times by what a seed says, gone on with until its end, and then looked at.

Also the sweep: one run for every single point that an orchestrator passes, hit exactly there.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import check
from points import Hit
from session import NONE, SLOTS, Ended, Fault, Workshop

# What `check` and every concluding orchestrator load late: once here, so that forks have it.
from reports import html, junit, sarif, summary  # noqa: F401

MOST_FAULTS = 4
# The exit codes with which an orchestrator may answer each kind of fault; -9 is a kill, 0 that it was over before.
CODES = {
    "kill at": (-9, 0),
    "kill after": (-9, 0),
    "stop then kill": (-9, 0),
    "stop and go on": (0,),
    "full": (3, 0),
    "clock": (0,),
    "terminate": (143, 0),
    "interrupt": (130, 0),
    "interrupt twice": (130, 0),
    "none": (0,),
}


@dataclass
class Tally:
    """What a series of rounds did."""

    rounds: int = 0
    orchestrators: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    tails: Counter[str] = field(default_factory=Counter)
    hit: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reference:
    """The uninterrupted run: what it came to, how many points and seconds it had."""

    results: dict[str, Any]
    points: int
    names: dict[str, int]
    wall_s: float


def reference(shop: Workshop, matrix: str) -> Reference:
    """Run a matrix undisturbed: by all workers, and by one, which must come to the same."""
    found: list[Reference] = []
    for slots in dict.fromkeys((SLOTS, 1)):
        run = shop.folder / f"reference-{matrix}-{slots}"
        ended = shop.orchestrate(run, matrix, slots=slots)
        wrong = check.after(run, shop.ledger(run), shop.locks)
        if ended.code or wrong:
            raise AssertionError(f"the undisturbed run ended with {ended.code}: {wrong}\n{ended.text[-2000:]}")
        found.append(Reference(check.results(run), ended.points, ended.names, ended.wall_s))
    wrong = list(check.differences(found[0].results, found[-1].results))
    if wrong:
        raise AssertionError(f"two undisturbed runs differ: {wrong[:3]}")
    return found[0]


def play(shop: Workshop, matrix: str, seed: int, known: Reference, tally: Tally) -> list[str]:
    """One round: a run of `matrix` under the faults that `seed` chooses. Returns what is wrong afterwards."""
    chance = random.Random(seed)
    slots = chance.choice((SLOTS, SLOTS, 1))
    run = shop.folder / f"round-{seed}"
    wrong: list[str] = []
    for _ in range(chance.randint(1, MOST_FAULTS)):
        fault = choose(chance, known)
        ended = _orchestrate(shop, run, matrix, fault, slots, tally)
        if ended.code not in CODES[fault.name]:
            wrong.append(f"{fault.name} ended with {ended.code}: {ended.text[-2000:]}")
        wrong += check.during(run, shop.ledger(run))
        if ended.code == 0:
            break
        if chance.random() < 0.3:
            _tamper(run, chance, tally)
    wrong += _to_the_end(shop, run, matrix, slots, known, tally)
    return _put_away(shop, run, wrong, tally)


def sweep(shop: Workshop, hits: Iterable[Hit], known: Reference, tally: Tally) -> list[str]:
    """Hit the small matrix at each of these points, one run each."""
    for number, hit in enumerate(hits):
        action = hit.action
        run = shop.folder / f"sweep-{number}"
        ended = _orchestrate(shop, run, "small", Fault(_NAMES[action], hit), SLOTS, tally)
        wrong = [] if ended.code in CODES[_NAMES[action]] else [f"ended with {ended.code}: {ended.text[-2000:]}"]
        wrong += check.during(run, shop.ledger(run))
        wrong += _to_the_end(shop, run, "small", SLOTS, known, tally)
        if _put_away(shop, run, wrong, tally):
            return [f"{hit} ({ended.where})", *wrong]
    return []


_NAMES = {"kill": "kill at", "full": "full", "clock": "clock"}


def choose(chance: random.Random, known: Reference) -> Fault:
    """A fault: mostly kills, at a point or at a moment."""
    at = chance.randrange(int(known.points * 0.6))
    after = 0.1 + chance.random() * known.wall_s * 0.6  # no earlier than the command that a person would interrupt
    pause = 0.02 + chance.random() * 0.3
    table = {
        "kill at": (8, Fault("kill at", Hit("kill", at))),
        "full": (2, Fault("full", Hit("full", at))),
        "clock": (1, Fault("clock", Hit("clock", at))),
        "kill after": (6, Fault("kill after", signals=((after, signal.SIGKILL),))),
        "stop then kill": (
            1,
            Fault("stop then kill", signals=((after, signal.SIGSTOP), (pause, signal.SIGKILL))),
        ),
        "stop and go on": (
            1,
            Fault("stop and go on", signals=((after, signal.SIGSTOP), (pause, signal.SIGCONT))),
        ),
        "terminate": (1, Fault("terminate", signals=((after, signal.SIGTERM),))),
        "interrupt": (1, Fault("interrupt", signals=((after, signal.SIGINT),))),
        "interrupt twice": (1, Fault("interrupt twice", signals=((after, signal.SIGINT), (pause, signal.SIGINT)))),
    }
    names = list(table)
    return table[chance.choices(names, [table[name][0] for name in names])[0]][1]


def _orchestrate(shop: Workshop, run: Path, matrix: str, fault: Fault, slots: int, tally: Tally) -> Ended:
    ended = shop.orchestrate(run, matrix, fault, slots=slots)
    tally.orchestrators += 1
    tally.attempts += ended.executed or 0
    if fault is not NONE:
        tally.faults[fault.name] += 1
        if ended.where:
            tally.hit[ended.where] += 1
    return ended


def _to_the_end(shop: Workshop, run: Path, matrix: str, slots: int, known: Reference, tally: Tally) -> list[str]:
    """Go on undisturbed until the run is over, and once more; then compare with the run that nothing hit."""
    ended = _orchestrate(shop, run, matrix, NONE, slots, tally)
    if ended.code:
        return [f"the resumed run ended with {ended.code}: {ended.text[-2000:]}"]
    wrong = check.after(run, shop.ledger(run), shop.locks)
    again = _orchestrate(shop, run, matrix, NONE, slots, tally)
    if (again.code, again.executed) != (0, 0):
        wrong.append(f"d: a second resume ended with {again.code} and ran {again.executed} attempts")
    wrong += check.after(run, shop.ledger(run), shop.locks)
    return [*wrong, *check.differences(known.results, check.results(run))]


def _put_away(shop: Workshop, run: Path, wrong: list[str], tally: Tally) -> list[str]:
    """Count the round, and keep its folder only where something is wrong."""
    tally.rounds += 1
    tally.wrong += wrong
    if not wrong:
        shutil.rmtree(run)
        shutil.rmtree(shop.ledger(run))
    return wrong


def _tamper(run: Path, chance: random.Random, tally: Tally) -> None:
    """What a power cut can leave behind an orchestrator: a torn tail, NUL bytes, the late result of an old attempt."""
    file = run / "journal"
    if not file.is_file() or not file.stat().st_size:
        return
    what = chance.choice(("torn", "NUL", "garbage", "late result"))
    tally.tails[what] += 1
    if what == "late result":
        for folder in sorted((run / "cells").glob("*/attempt-*")):
            if not (folder / "result.json").exists():
                (folder / "result.json").write_text('{"late": true}')
                return
        return
    size = chance.randrange(1, 200)
    torn = b'{"seq": 4000, "kind": "done", "time": "'
    more = {"torn": torn[:size], "NUL": b"\0" * size, "garbage": chance.randbytes(size).replace(b"\n", b"")}
    with file.open("ab") as stream:
        stream.write(more[what])
