"""`orchestrator` with the stand-in programs for its cells: its real entry, its real commands."""

from pathlib import Path

from orchestrator.cells import base

script = str(Path(__file__).with_name("fake_program.py"))
for name in ("orchestrator", "tuner", "serving"):
    base.PROGRAMS[name] = (base.PYTHON, "-I", "-S", script, name)  # type: ignore[index]

if __name__ == "__main__":
    from orchestrator.__main__ import main

    main()
