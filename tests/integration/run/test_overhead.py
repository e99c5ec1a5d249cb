"""What the orchestrator itself costs, with bounds that a busy machine keeps; docs/results holds the figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moegate import journal
from orchestrator.scheduler.core import Scheduler


def test_time_and_memory_per_cell_stay_small() -> None:
    script = Path(__file__).with_name("overhead.py")
    done = subprocess.run([sys.executable, str(script), "80"], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"] == 80
    # About 12 ms of its own processor time, and 25 ms by the clock: ten times that on a busy machine.
    assert found["cpu_ms"] <= 40, found
    assert found["overhead_ms"] <= 250, found
    assert found["plan_10000_s"] <= 5, found
    assert found["rss_mib"] <= 300, found


def test_a_cell_that_passes_makes_no_other_hopeless(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each end would look at all that wait: quadratic in the cells of a run."""
    looked: list[int] = []
    real = Scheduler._block_hopeless

    def counted(self: Scheduler) -> None:
        looked.append(len(self._waiting))
        real(self)

    monkeypatch.setattr(Scheduler, "_block_hopeless", counted)
    ops = ", ".join(f"op{number}" for number in range(12))
    run.edit(("    dtypes: [float32]", f"    ops: [{ops}]\n    dtypes: [float32]"))
    run("kernel-test/*")
    assert sum(entry.kind == "final" for entry in journal.read(run.path / "journal")) == 12
    assert looked == [12]
