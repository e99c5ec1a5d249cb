"""Runs a plan with the stand-in programs, as a process of its own: what the tests that kill an orchestrator kill."""

import sys
from pathlib import Path

from moegate.entry import open_streams
from orchestrator.cells.base import PYTHON
from orchestrator.matrix import load
from orchestrator.plan import build
from orchestrator.scheduler import execute

open_streams()
repository, out = Path(sys.argv[1]), Path(sys.argv[2])
script = str(Path(__file__).with_name("fake_program.py"))
programs = {name: (PYTHON, "-I", "-S", script, name) for name in ("orchestrator", "tuner", "serving")}
only = [word.removeprefix("--only=") for word in sys.argv if word.startswith("--only=")]
session = execute(
    build(load(repository / "matrix.yaml"), only=only),
    out,
    resume="--resume" in sys.argv,
    root=repository,
    programs=programs,
)
print(f"executed {session.executed}")
# VmHWM: ru_maxrss counts what a process was before exec, which is a copy of pytest.
peak_kib = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
print(f"peak {peak_kib >> 10} MiB")
sys.exit(int(session.interrupted or 0))
