#!/usr/bin/env python3
"""The last job of a gated workflow: judge, from trusted code and a trusted plan, what an untrusted runner sent back.

Usage: infra/ci/verdict.py --plan PLAN.json --run RUNDIR [--summary FILE] [--status FILE]

PLAN.json was made by this same job's code before anything was measured. RUNDIR is what came back: data to validate,
never code. Fails closed: no folder, another plan, or a planned cell without a result is exit 3, whatever else is good.
Prints one line, appends the run's summary to --summary (cut to what GitHub shows), and writes `state` and `text` to
--status in the format of GITHUB_OUTPUT.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from moegate import canonical, journal
from moegate.errors import MoegateError
from moegate.exits import Exit
from moegate.records import Plan
from moegate.records import read as read_record

SUMMARY_BYTES = 900 << 10  # GitHub cuts a step's summary at 1024 KiB, and drops it whole when it is longer
STATES = {Exit.OK: "success", Exit.REGRESSION: "failure", Exit.INCONCLUSIVE: "failure"}


def mismatch(plan: Plan, run: Path) -> str | None:
    """Return why `run` is not a whole run of `plan`, or None."""
    if not (run / "plan.json").is_file():
        return "no results were received"
    theirs = read_record(Plan, run / "plan.json")
    planned, received = {cell.id for cell in plan.cells}, {cell.id for cell in theirs.cells}
    if not planned:
        return "the plan has no cells"
    if planned != received:
        lost, more = sorted(planned - received), sorted(received - planned)
        return f"other cells were run than planned (missing {lost[:5]}, unplanned {more[:5]})"
    if (theirs.matrix_digest, _arms(theirs)) != (plan.matrix_digest, _arms(plan)):
        return "the matrix or the arms of the run are not those of the plan"
    final = {entry.data.get("cell") for entry in journal.read(run / "journal") if entry.kind == "final"}
    unfinished = sorted(planned - final)
    if unfinished:
        return f"{len(unfinished)} of {len(planned)} planned cells have no result (first: {unfinished[0]})"
    return None


def foreign(run: Path) -> str | None:
    """Return the first thing in `run` that is neither a plain file nor a folder: a link could lead our writing out."""
    for path in (run, *run.rglob("*")) if run.exists() or run.is_symlink() else ():
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            return path.name[:80]
    return None


def _arms(plan: Plan) -> list[tuple[str, str, dict[str, str], str | None]]:
    """The arms without what differs between two checkouts: a folder's place on its machine."""
    return [
        (arm.name, Path(arm.configs).name if Path(arm.configs).is_absolute() else arm.configs, arm.env, arm.source)
        for arm in plan.arms
    ]


def judge(plan_file: Path, run: Path) -> tuple[Exit, str]:
    """Return the exit code and one sentence."""
    odd = foreign(run)
    if odd is not None:
        return Exit.INFRA, f"what was received holds {odd!r}, which is no plain file"
    try:
        reason = mismatch(read_record(Plan, plan_file), run)
    except MoegateError as error:
        return Exit.INFRA, f"what was received cannot be believed: {error}"
    if reason:
        return Exit.INFRA, reason
    # The policy in force is the plan's own: whatever the runner may have written over it is put aside.
    shutil.copyfile(plan_file, run / "plan.json")
    argv = [sys.executable, "-P", "-m", "orchestrator", "gate", str(run), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    try:
        document: dict[str, Any] = json.loads(done.stdout)
        sentence = str(document["sentence"])
    except (ValueError, KeyError, TypeError):
        lines = done.stderr.strip().splitlines()
        return Exit.INFRA, f"the gate gave no answer: {lines[-1][:200] if lines else done.returncode}"
    try:
        return Exit(done.returncode), sentence
    except ValueError:
        return Exit.INFRA, f"the gate ended with {done.returncode}"


def write_summary(run: Path, target: Path, sentence: str) -> None:
    """Append the run's own summary, made anew by our code, cut to what fits."""
    argv = [sys.executable, "-P", "-m", "orchestrator", "report", str(run)]
    subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    file = run / "summary.md"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else f"**{sentence}**\n"
    data = text.encode()
    if len(data) > SUMMARY_BYTES:
        text = data[:SUMMARY_BYTES].decode(errors="ignore") + "\n\n(cut; the rest is in the report artifact)\n"
    with target.open("a", encoding="utf-8") as stream:
        stream.write(text)


def main(argv: list[str] | None = None) -> int:
    """Judge one received run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--summary", type=Path)
    parser.add_argument("--status", type=Path)
    options = parser.parse_args(argv)
    code, sentence = judge(options.plan, options.run)
    sentence = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+", " ", sentence)[:300]
    # A line that starts with :: would be a command to the runner.
    print(f"verdict: exit {int(code)}: {sentence}")
    if options.summary:
        if code is Exit.INFRA:
            with options.summary.open("a", encoding="utf-8") as stream:
                stream.write(f"**No verdict.** {canonical.dumps(sentence)}\n")
        else:
            write_summary(options.run, options.summary, sentence)
    if options.status:
        with options.status.open("a", encoding="utf-8") as stream:
            stream.write(f"state={STATES.get(code, 'error')}\ntext={sentence}\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
