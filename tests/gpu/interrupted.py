"""Ctrl-C of a tuning, for real: it ends with what it has, and the same command goes on from there.

    python tests/gpu/interrupted.py --out DIR --shape E=64,N=896,H=1280,topk=6 --after 12,10 -- --effort quick

Sends SIGINT to all its processes, as a terminal does, after so many seconds of each start, then lets the last one run
to its end. Prints, as JSON: each run's exit code, seconds and outcomes in the journal so far, how many outcomes were
measured more than once, and the files written.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from moegate.journal import read  # noqa: E402
from tuner.journaled import PURPOSE, outcome_of  # noqa: E402

_LONGEST_S = 300.0


def outcomes(journal: Path) -> Counter[str]:
    """How often each unit and rung was written down."""
    if not journal.is_file():
        return Counter()
    found = [outcome_of(entry.data) for entry in read(journal, purpose=PURPOSE) if entry.kind == "outcome"]
    return Counter(f"{outcome.rung} {outcome.unit.spell()}" for outcome in found)


def start(command: list[str], after: float | None, journal: Path) -> dict[str, Any]:
    """One run, interrupted after `after` seconds (None: not at all)."""
    began, asked = time.monotonic(), 0.0
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        child.wait(_LONGEST_S if after is None else after)
    except subprocess.TimeoutExpired:
        asked = time.monotonic()
        os.killpg(child.pid, signal.SIGINT)
        child.wait(_LONGEST_S)
    seconds = round(time.monotonic() - began, 1)
    found: dict[str, Any] = {"exit": child.returncode, "seconds": seconds, "outcomes": len(outcomes(journal))}
    return found | ({"ended_after_s": round(time.monotonic() - asked, 2)} if asked else {})


def main() -> None:
    """Run, interrupt, run again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--after", required=True, help="Seconds, one number for each interrupted start.")
    parser.add_argument("more", nargs="*", help="What else `tuner tune` is told.")
    args = parser.parse_args()
    command = [sys.executable, "-m", "tuner", "tune", "--shape", args.shape, "--out", str(args.out), *args.more]
    journal = args.out / "journal"
    runs = [start(command, after, journal) for after in (*map(float, args.after.split(",")), None)]
    found = outcomes(journal)
    files = sorted(str(path.relative_to(args.out)) for path in (args.out / "configs").rglob("*.json"))
    report = {"runs": runs, "twice": sum(count > 1 for count in found.values()), "files": files}
    (args.out / "interrupted.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
