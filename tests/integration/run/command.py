"""`orchestrator` with the stand-in programs for its cells: its real entry, its real commands."""

from pathlib import Path

from orchestrator import __main__ as entry

SCRIPT = str(Path(__file__).with_name("fake_program.py"))
work = entry._work


def with_stand_ins() -> object:
    """Loaded as late as the commands themselves: what is imported before the entry is beyond its care."""
    from orchestrator.cells import base

    for name in ("orchestrator", "tuner", "serving"):
        base.PROGRAMS[name] = (base.PYTHON, "-I", "-S", SCRIPT, name)
    return work()


if __name__ == "__main__":
    entry._work = with_stand_ins
    entry.main()
