"""What tests that stop an orchestrator ask of its run: how far it is, and what holds of it afterwards."""

import os
import subprocess
import time
from collections import Counter
from pathlib import Path

from moegate import journal
from orchestrator.bundle import read_run
from orchestrator.scheduler.state import run_id


def marked(run: str) -> list[int]:
    """Processes that carry the run's mark."""
    found = []
    for name in (path.name for path in Path("/proc").iterdir()):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if f"MOEGATE_RUN={run}".encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
            except OSError:
                continue
    return found


def wait_for_a_launch(process: subprocess.Popen[str], path: Path) -> None:
    """Wait until a launch of two arms is in the journal: check, test and tuning are over then, and it stands still."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if (path / "journal").is_file() and b'"launch"' in (path / "journal").read_bytes():
            entries = journal.read(path / "journal")
            if any(entry.kind == "launch" and entry.data["cell"].startswith("kernel-bench") for entry in entries):
                return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    raise AssertionError("the run makes no progress")


def check_history(path: Path) -> dict[str, str]:
    """The invariants that hold after any number of kills; returns each cell's final state."""
    entries = journal.read(path / "journal")
    done, leases = Counter(), Counter()
    passed: set[tuple[str, str]] = set()
    for entry in entries:
        key = (entry.data.get("cell"), entry.data.get("attempt"))
        if entry.kind == "lease":
            leases[key] += 1
            assert (entry.data["cell"], entry.data["stage"]) not in passed, "a finished stage was executed again"
        if entry.kind == "done":
            done[key] += 1
            if entry.data["state"] == "PASSED":
                passed.add((entry.data["cell"], entry.data["stage"]))
    assert set(done) == set(leases), "each attempt has an end"
    assert set(done.values()) == set(leases.values()) == {1}, "and only one"
    facts = read_run(path)
    assert not marked(run_id(entries)), "nothing of the run is left running"
    return {outcome.cell: outcome.state for outcome in facts.outcomes}
