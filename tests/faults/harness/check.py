"""The nine invariants of a run, read from its journal, its files, the process table and what its children wrote down.

| | |
|---|---|
| a | each planned cell has exactly one final verdict |
| b | no two launches on one exclusive device at the same time |
| c | what the journal calls done exists, with the hash that it had |
| d | a second resume executes nothing |
| e | the reports count what the journal counts |
| f | the gate is red while a verdict is missing |
| g | nothing of the run remains: no process, no lock, no temporary file |
| h | no more attempts than allowed; none of a finished stage |
| i | results depend on neither the order nor the number of workers |

Each function returns what is wrong, in words; an empty list is a pass. `d` and `i` compare two runs: see rounds.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moegate import canonical, journal
from moegate.journal import Entry
from moegate.records import FINAL_STATES, Plan, to_json
from orchestrator.bundle import read_run
from orchestrator.commands._conclude import bundle_of
from orchestrator.scheduler import RunDir
from orchestrator.scheduler.state import KEPT

TOP = {
    "plan.json", "journal", "lock", "cells", "configs", "comparison.json", "gate.json", "report.html", "junit.xml",
    "results.sarif", "summary.md",
}  # fmt: skip
ATTEMPT = {"result.json", "stdout.log", "stderr.log"}
LEFT_S = 60.0


def during(run: Path, ledger: Path) -> list[str]:
    """What must hold at any moment, also right after a kill."""
    if not (run / "journal").is_file():
        return []
    entries = journal.read(run / "journal")
    plan = RunDir(run).read_plan() if (run / "plan.json").is_file() else None
    wrong = [*_attempts(entries, plan), *_devices(entries), *_done(run, entries), *_launches(entries, ledger)]
    return wrong if plan is None else [*wrong, *_gate(run, plan)]


def after(run: Path, ledger: Path, locks: Path) -> list[str]:
    """What must hold once a run has come to its end."""
    entries = journal.read(run / "journal")
    plan = RunDir(run).read_plan()
    wrong = during(run, ledger)
    wrong += [*_verdicts(plan, entries), *_counts(run, plan, entries), *_ends(entries)]
    return [*wrong, *_processes(entries), *_containers(entries), *_locks(run, locks), *_files(run, plan, entries)]


# a, e, f: verdicts


def _verdicts(plan: Plan, entries: list[Entry]) -> Iterator[str]:
    """Exactly one `final` entry after a cell's last lease, and it names a state that is an end."""
    finals: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        if entry.kind == "lease":
            finals[entry.data["cell"]].clear()
        elif entry.kind == "final":
            finals[entry.data["cell"]].append(entry.data["state"])
    for cell in plan.cells:
        found = finals[cell.id]
        if len(found) != 1 or found[0] not in FINAL_STATES:
            yield f"a: {cell.label} has the verdicts {found}"


def _counts(run: Path, plan: Plan, entries: list[Entry]) -> Iterator[str]:
    last = {entry.data["cell"]: entry.data["state"] for entry in entries if entry.kind == "final"}
    states = Counter(last[cell.id] for cell in plan.cells if cell.id in last)
    counts = json.loads((run / "gate.json").read_text())["counts"]
    if (counts["cells"], counts.get("passed", 0)) != (len(plan.cells), states["PASSED"]):
        yield f"e: gate.json counts {counts}, the journal {dict(states)}"
    suite = ET.parse(run / "junit.xml").getroot()
    if int(suite.get("tests", -1)) != len(plan.cells):
        yield f"e: junit.xml has {suite.get('tests')} tests for {len(plan.cells)} cells"
    told = Counter(outcome.state for outcome in read_run(run).outcomes)
    if told != states:
        yield f"e: the report is made of {dict(told)}, the journal of {dict(states)}"


def _gate(run: Path, plan: Plan) -> Iterator[str]:
    bundle = bundle_of(run)
    open_cells = [outcome for outcome in bundle.outcomes if outcome.state not in FINAL_STATES]
    if open_cells and bundle.gate.exit == 0:
        yield f"f: the gate passes while {len(open_cells)} of {len(plan.cells)} cells have no verdict"


# b, h: leases and launches


def _devices(entries: list[Entry]) -> Iterator[str]:
    """Between a lease and its end nobody else has the slot; a new orchestrator closes what the last one left."""
    holder: dict[str, tuple[str, int]] = {}
    for entry in entries:
        data = entry.data
        if entry.kind == "lease" and not data["slot"].startswith("host"):
            if data["slot"] in holder:
                yield f"b: entry {entry.seq} leases {data['slot']}, which {holder[data['slot']]} still has"
            holder[data["slot"]] = (data["cell"], data["attempt"])
        elif entry.kind == "done":
            holder = {slot: who for slot, who in holder.items() if who != (data["cell"], data["attempt"])}


def _launches(entries: list[Entry], ledger: Path) -> Iterator[str]:
    """Each child that ran was announced in the journal before, once; and none met another on its processors."""
    announced = Counter(
        f"{entry.data['cell']}/attempt-{entry.data['attempt']}/launch-{entry.data['number']:03d}"
        for entry in entries
        if entry.kind == "launch"
    )
    begun: Counter[str] = Counter()
    file = ledger / "launches"
    for line in file.read_text().splitlines() if file.is_file() else []:
        word, _, folder = line.partition(" ")
        name = "/".join(Path(folder).parts[-3:])
        if word == "overlap":
            yield f"b: {name} met another launch on its processors"
        begun[name] += word == "begin"
    for name, times in announced.items():
        if times != 1:
            yield f"h: {name} was announced {times} times"
    for name, times in begun.items():
        if times > 1 or name not in announced:
            yield f"h: {name} began {times} times and was announced {announced[name]} times"


def _attempts(entries: list[Entry], plan: Plan | None) -> Iterator[str]:
    retries = {cell.id: cell.retries for cell in plan.cells} if plan else {}
    leases: Counter[tuple[str, int]] = Counter()
    ends: Counter[tuple[str, int]] = Counter()
    tried: Counter[tuple[str, str, str]] = Counter()
    passed: dict[tuple[str, str], str] = {}
    kept: dict[str, str] = {}
    keys: dict[tuple[str, int], str] = {}
    for entry in entries:
        data = entry.data
        who = (data.get("cell", ""), data.get("attempt", 0))
        if entry.kind == "lease":
            leases[who] += 1
            keys[who] = data["key"]
            if passed.get((data["cell"], data["stage"])) == data["key"]:
                yield f"h: entry {entry.seq} runs {data['cell']} {data['stage']} again after it had passed"
            if kept.get(data["cell"]) == data["key"]:
                yield f"h: entry {entry.seq} runs {data['cell']} again after its verdict"
        elif entry.kind == "done":
            ends[who] += 1
            if data["state"] == "PASSED":
                passed[data["cell"], data["stage"]] = keys.get(who, "")
            if data["state"] != "CANCELLED":
                tried[data["cell"], data["stage"], keys.get(who, "")] += 1
        elif entry.kind == "final" and data["state"] in KEPT:
            kept[data["cell"]] = next((key for (cell, _), key in reversed(keys.items()) if cell == data["cell"]), "")
    yield from (f"h: {who} was leased {times} times" for who, times in leases.items() if times != 1)
    yield from (f"h: {who} ended {times} times" for who, times in ends.items() if times != 1 or who not in leases)
    for (cell, stage, _), times in tried.items():
        if times > 1 + retries.get(cell, 1):
            yield f"h: {cell} {stage} was tried {times} times"


def _ends(entries: list[Entry]) -> Iterator[str]:
    kinds = {
        kind: {(entry.data["cell"], entry.data["attempt"]) for entry in entries if entry.kind == kind}
        for kind in ("lease", "done")
    }
    for who in sorted(kinds["lease"] - kinds["done"]):
        yield f"h: {who} has no end"


# c, g: what lies on the disk and what runs


def _done(run: Path, entries: list[Entry]) -> Iterator[str]:
    for entry in entries:
        if entry.kind == "done" and entry.data["state"] == "PASSED":
            file = run / str(entry.data["result"])
            if not file.is_file() or canonical.file_digest(file) != entry.data["sha256"]:
                yield f"c: entry {entry.seq} promises {entry.data['result']}, which is missing or differs"


def marked(run_id: str) -> list[int]:
    """Processes that carry the run's mark in their environment."""
    found = []
    for name in _names(Path("/proc")):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if f"MOEGATE_RUN={run_id}".encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
            except OSError:
                continue
    return found


def _processes(entries: list[Entry]) -> Iterator[str]:
    run_id = next((entry.data["run"] for entry in entries if entry.kind == "run"), "")
    until = time.monotonic() + LEFT_S  # a killed process takes a moment to go
    while (left := marked(run_id)) and time.monotonic() < until:
        time.sleep(0.02)
    if left:
        yield f"g: the processes {left} are still running"


def _containers(entries: list[Entry]) -> Iterator[str]:
    """Containers with the run's label, where a daemon answers; a run of processes must have made none."""
    run_id = next((entry.data["run"] for entry in entries if entry.kind == "run"), "")
    if Path("/var/run/docker.sock").exists() and shutil.which("docker"):
        argv = ["docker", "ps", "--all", "--quiet", "--filter", f"label=moegate.run={run_id}"]
        found = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120).stdout.split()
        if found:
            yield f"g: the containers {found} are left"


def _locks(run: Path, locks: Path) -> Iterator[str]:
    for path in [run / "lock", run / "journal", *locks.glob("*.lock")]:
        with path.open("rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield f"g: {path.name} is still locked"


def _files(run: Path, plan: Plan, entries: list[Entry]) -> Iterator[str]:
    """Nothing but what the run directory is documented to hold."""
    yield from (f"g: {name} is left behind" for name in sorted(_names(run) - TOP))
    ids = {cell.id for cell in plan.cells}
    known = {(entry.data["cell"], entry.data["attempt"]) for entry in entries if entry.kind == "lease"}
    for attempt in (run / "cells").glob("*/*"):
        number = re.fullmatch(r"attempt-(\d+)", attempt.name)
        if attempt.parent.name not in ids or number is None or (attempt.parent.name, int(number[1])) not in known:
            yield f"g: {attempt.relative_to(run)} belongs to no attempt"
            continue
        names = sorted(_names(attempt) - ATTEMPT)
        yield from (f"g: {attempt.relative_to(run) / name} is left" for name in names)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# i: results


def results(run: Path) -> dict[str, Any]:
    """Everything of a run that has to come out alike, however it went: by the labels of its cells."""
    facts = read_run(run)
    out: dict[str, Any] = {}
    for outcome in facts.outcomes:
        measured = [to_json(measurement) for measurement in facts.measurements.get(outcome.cell, ())]
        for body in measured:
            body["detail"].pop("attempt")  # how often it took is what a fault changes
            for launch in body["launches"]:
                launch["device"].pop("identity")  # which of two equal slots it got
            body["device"].pop("identity")
        label = next(cell.label for cell in facts.plan.cells if cell.id == outcome.cell)
        out[label] = {"state": outcome.state, "reason": outcome.reason, "measured": measured}
    out["configs"] = facts.config_files
    out["gate"] = json.loads((run / "gate.json").read_text())
    out["comparison"] = json.loads((run / "comparison.json").read_text())
    return out


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two results differ, by path."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from differences(one.get(key), other.get(key), f"{path}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{path}/{index}")
    elif one != other:
        yield f"i: {path}: {one!r:.80} is not {other!r:.80}"
