"""Break runs on purpose and look whether anything is lost, done twice or left running.

usage: python -P tests/faults/harness rounds|sweep [--rounds N] [--seed S] [--seconds S] [--out FILE] [--keep DIR]

`rounds` plays random faults against a matrix of 60 cells, round by round; round i has the seed S + i, and
`--rounds 1 --seed THAT` plays it again. `sweep` hits a small matrix at every point of an orchestrator (`--every N`: at
each N-th; `--names GLOB`: at one point of each matching name, by chance). Exits 1 at the first thing that is wrong, and
says what.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import random
import resource
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from points import Hit
from rounds import Tally, play, reference, sweep
from session import SLOTS, Workshop


def main() -> int:
    """Run the harness; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rounds", "sweep"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="0: a new one, which is printed")
    parser.add_argument("--seconds", type=float, default=0.0, help="start no round after so many seconds; 0: no limit")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--names")
    parser.add_argument("--actions", default="kill,full")
    parser.add_argument("--out", type=Path, help="write what was done as JSON")
    parser.add_argument("--keep", type=Path, help="work here, and leave what went wrong behind")
    asked = parser.parse_args()
    seed = asked.seed or random.SystemRandom().randrange(1, 1 << 30)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="moegate-faults-") as temporary:
        shop = Workshop(asked.keep or Path(temporary))
        began, tally = time.monotonic(), Tally()
        wrong = (_rounds if asked.what == "rounds" else _sweep)(asked, shop, seed, tally)
        report = _report(asked, seed, tally, time.monotonic() - began)
        if asked.out:
            asked.out.write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(report), flush=True)
    for line in wrong[:20]:
        print(f"WRONG {line}", flush=True)
    return 1 if wrong else 0


def _rounds(asked: argparse.Namespace, shop: Workshop, seed: int, tally: Tally) -> list[str]:
    known = reference(shop, "large")
    began = time.monotonic()
    for number in range(asked.rounds):
        if asked.seconds and time.monotonic() - began > asked.seconds:
            break
        wrong = play(shop, "large", seed + number, known, tally)
        if wrong:
            return [f"round {number}: play it again with --rounds 1 --seed {seed + number}", *wrong]
        if number % 25 == 24:
            print(f"{number + 1} rounds, {time.monotonic() - began:.0f} s", flush=True)
    return []


def _sweep(asked: argparse.Namespace, shop: Workshop, seed: int, tally: Tally) -> list[str]:
    known = reference(shop, "small")
    chance = random.Random(seed)
    first = chance.randrange(asked.every)
    hits: list[Hit] = []
    for action in asked.actions.split(","):
        if asked.names is None:
            hits += [Hit(action, at) for at in range(first, known.points, asked.every)]
        else:
            names = fnmatch.filter(known.names, asked.names)
            hits += [Hit(action, chance.randrange(known.names[name]), name) for name in names]
    return sweep(shop, hits, known, tally)


def _report(asked: argparse.Namespace, seed: int, tally: Tally, wall_s: float) -> dict[str, Any]:
    return {
        "what": asked.what,
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python -P tests/faults/harness " + " ".join(sys.argv[1:]),
        "host": f"{os.cpu_count()} CPUs, Linux {platform.release()}, Python {platform.python_version()}",
        "rounds": tally.rounds,
        "seeds": [seed, seed + max(tally.rounds - 1, 0) if asked.what == "rounds" else seed],
        "orchestrators": tally.orchestrators,
        "slots": SLOTS,
        "attempts_in_runs_that_ended": tally.attempts,
        "faults": dict(tally.faults.most_common()),
        "between": dict(tally.tails.most_common()),
        "points_hit": sum(tally.hit.values()),
        "kinds_of_points_hit": len(tally.hit),
        "points": dict(sorted(tally.hit.items())),
        "wrong": len(tally.wrong),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024),
        "wall_s": round(wall_s, 1),
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    sys.exit(main())
