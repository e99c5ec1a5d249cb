"""What the orchestrator itself costs: `python tests/integration/run/overhead.py CELLS [OUT.json]`.

Cells that do nothing run through process isolation on two slots (one where the host has one processor). The same
children are started without an orchestrator before and after, as many at a time; the difference per cell is the
orchestrator's. Also timed: planning 10,000 cells.
"""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moegate.records import Plan
from orchestrator.cells.base import PYTHON
from orchestrator.matrix import load
from orchestrator.plan import build
from orchestrator.scheduler import execute
from orchestrator.scheduler.progress import Progress

SCRIPT = str(Path(__file__).with_name("fake_program.py"))
SLOTS = min(2, len(os.sched_getaffinity(0)))
PLANNED = 10_000
MATRIX = """\
schema: 1
name: overhead
pools:
  cpu: {{device: cpu, ray: none, isolation: process, slots: {slots}}}
cells:
  - {{kind: kernel-test, pools: [cpu], dtypes: [float32], ops: [{ops}]}}
"""


def plan_of(root: Path, cells: int) -> Plan:
    """A plan of `cells` cells that do nothing."""
    ops = ", ".join(f"op{number}" for number in range(cells))
    (root / "matrix.yaml").write_text(MATRIX.format(slots=SLOTS, ops=ops))
    return build(load(root / "matrix.yaml"))


def alone(root: Path, count: int) -> float:
    """Seconds of one child without an orchestrator, two at a time, as a slot sees it."""

    def child(number: int) -> None:
        folder = root / f"alone-{time.monotonic_ns()}-{number}"
        folder.mkdir()
        argv = [sys.executable, "-I", "-S", SCRIPT, "tuner", "verify", f"--out={folder}/measurement.json"]
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            subprocess.run(argv, stdout=out, stderr=err, stdin=subprocess.DEVNULL, cwd=folder, check=True)

    with ThreadPoolExecutor(SLOTS) as pool:
        return SLOTS * seconds(lambda: list(pool.map(child, range(count)))) / count


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def peak_mib() -> int:
    """VmHWM: ru_maxrss counts what the process was before exec, which may be a large copy of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) >> 10


def measure(cells: int) -> dict[str, Any]:
    """Run everything once."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOEGATE_LOCK_DIR"] = f"{folder}/locks"
        root = Path(folder)
        (root / "pyproject.toml").touch()
        planning = seconds(lambda: plan_of(root, PLANNED))
        plan = plan_of(root, cells)
        programs = {name: (PYTHON, "-I", "-S", SCRIPT, name) for name in ("orchestrator", "tuner", "serving")}
        load_before = os.getloadavg()[0]
        before = alone(root, max(cells // 5, 10))
        cpu = time.process_time()
        wall = seconds(lambda: execute(plan, root / "run", resume=False, root=root, programs=programs,
                                       progress=Progress(plan, io.StringIO())))  # fmt: skip
        cpu = time.process_time() - cpu
        own = (before + alone(root, max(cells // 5, 10))) / 2
        finals = (root / "run" / "journal").read_bytes().count(b'"state":"PASSED"')
    return {
        "schema": 1,
        "name": "orchestrator-overhead",
        "device": f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python tests/integration/run/overhead.py {cells} OUT.json",
        "load": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "cells": cells,
        "passed": finals // 2,  # one entry for the attempt, one for the cell
        "slots": SLOTS,
        "child_ms": round(own * 1e3, 1),
        "cell_ms": round(SLOTS * wall / cells * 1e3, 1),
        "overhead_ms": round((SLOTS * wall / cells - own) * 1e3, 1),
        "cpu_ms": round(cpu / cells * 1e3, 1),
        "plan_10000_s": round(planning, 2),
        "rss_mib": peak_mib(),
    }


if __name__ == "__main__":
    found = measure(int(sys.argv[1]))
    text = json.dumps(found, indent=1)
    print(text)
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(text + "\n")
