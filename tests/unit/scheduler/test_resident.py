"""Launches that are up at once: real children without torch, taking turns through marks in their folders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moegate.records import DeviceIdentity
from moegate.turns import FOLDER, rounds_of
from orchestrator.pools.isolation import PYTHON, LaunchSpec
from orchestrator.pools.isolation.process import ProcessIsolation
from orchestrator.pools.slots import HostDevice, Slot
from orchestrator.scheduler.classify import Ending
from orchestrator.scheduler.resident import alone, explained, run_together

# A client that notes when its loads run. `how` bends it: `late` dies in its last round, `early` never takes a turn.
CLIENT = """
import sys, time
from pathlib import Path
marks, log, how = Path("turns"), Path(sys.argv[1]), sys.argv[2]
def wait(name):
    while not (marks / name).is_file(): time.sleep(0.005)
def note(word):
    with log.open("a") as stream: stream.write(f"{sys.argv[3]} {word}\\n")
note("up")
if how == "early": sys.exit(0)
if how == "refuse": sys.exit("not enough memory")
(marks / "ready").touch()
for number in range(2):
    wait(f"go-{number}")
    note(f"begin{number}")
    time.sleep(0.05)
    if how == "late" and number == 1: sys.exit(1)
    note(f"end{number}")
    (marks / f"done-{number}").touch()
wait("end")
note("over")
"""


@pytest.fixture
def specs(tmp_path: Path) -> Callable[..., list[LaunchSpec]]:
    def make(*hows: str, seconds: float = 240.0) -> list[LaunchSpec]:
        slot = Slot("cpu", 0, HostDevice(DeviceIdentity("cpu", "a CPU", "cpu:here", "cpu"), 0), ())
        made = []
        for number, how in enumerate(hows):
            folder = tmp_path / f"launch-{number:03d}"
            folder.mkdir()
            argv = (PYTHON, "-c", CLIENT, str(tmp_path / "log"), how, "ab"[number])
            made.append(alone(LaunchSpec("run", "cell", 1, number, argv, folder, tmp_path / "out", tmp_path / "err",
                                         seconds / 2, slot)))  # fmt: skip
        return made

    return make


def log(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().splitlines()


def test_loads_alternate_there_and_back_and_nobody_ends_before_all_are_done(specs, tmp_path: Path) -> None:
    ended = run_together(ProcessIsolation(), specs("well", "well"), threading.Event())
    assert [end.result.returncode for end in ended] == [0, 0]
    assert log(tmp_path)[:10] == [
        "a up", "b up", "a begin0", "a end0", "b begin0", "b end0", "b begin1", "b end1", "a begin1", "a end1",
    ]  # fmt: skip
    assert sorted(log(tmp_path)[10:]) == ["a over", "b over"]


def test_order_of_rounds() -> None:
    assert rounds_of([0, 1], 3) == [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("hows", "first", "started"),
    [
        (("late", "well"), 0, "ab"), (("well", "late"), 1, "ab"), (("well", "refuse"), 1, "ab"),
        (("early", "well"), 0, "a"),
    ],
)  # fmt: skip
def test_who_ends_early_stops_the_other_and_is_named_first(
    specs, tmp_path: Path, hows: tuple[str, str], first: int, started: str
) -> None:
    began = time.monotonic()
    ended = run_together(ProcessIsolation(), specs(*hows), threading.Event())
    assert time.monotonic() - began < 100, "nobody waits for a deadline"
    assert (ended[first].place, ended[1 - first].place) == (0, 1)
    assert ended[first].result.returncode == (0 if "early" in hows else 1)
    assert ended[1 - first].result.cancelled
    assert {line[0] for line in log(tmp_path)} == set(started), "after the first one failed nobody else is started"
    assert not any("over" in line for line in log(tmp_path))


def test_cancel_ends_both(specs, tmp_path: Path) -> None:
    cancel = threading.Event()
    made = specs("well", "well")
    (made[0].workdir / FOLDER).mkdir()
    threading.Timer(0.5, cancel.set).start()
    made[1] = LaunchSpec(**{**vars(made[1]), "argv": (PYTHON, "-c", "import time; time.sleep(600)")})
    ended = run_together(ProcessIsolation(), made, cancel)
    assert all(end.result.cancelled for end in ended)


def test_a_deadline_holds_while_others_have_their_turn(specs) -> None:
    made = specs("well", "well", seconds=3.0)
    made[1] = LaunchSpec(**{**vars(made[1]), "argv": (PYTHON, "-c", "import time; time.sleep(600)")})
    ended = run_together(ProcessIsolation(), made, threading.Event())
    assert any(end.result.timed_out for end in ended)


def test_endings_are_said_in_words_that_fit_a_pair() -> None:
    assert "swap" in explained(Ending("OOM", "the kernel ended it"), False).reason
    assert "swap" in explained(Ending("FAILED", "do not fit the device's memory"), False).reason
    assert explained(Ending("FAILED", "exit status 7"), False).reason == "exit status 7"
    assert explained(Ending("CANCELLED", "stopped"), True).state == "CANCELLED"
    assert "partner" in explained(Ending("CANCELLED", "stopped"), False).reason
