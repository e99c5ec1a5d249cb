"""What a tuning and a comparison tell a person: progress, the most frequent failure, verdicts."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import termios
from pathlib import Path

import pytest

from moegate.journal import Journal
from tuner.compare import verdict_of
from tuner.config import Config
from tuner.journaled import PURPOSE, Journaled, most_frequent
from tuner.pipeline import gain_words
from tuner.progress import Progress, Watched
from tuner.strategies.base import Arena, ErrorClass, Outcome, Request, Unit, measure


def _tile(block_n: int) -> Config:
    return Config.of({"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": block_n, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1,
                      "num_warps": 4, "num_stages": 3})  # fmt: skip


class _Answers:
    """A runner that answers with what it was given, by BLOCK_SIZE_N."""

    def __init__(self, answers: dict[int, tuple[ErrorClass, str] | float]) -> None:
        self.answers, self.open = answers, list[Request]()

    def submit(self, requests: list[Request]) -> None:
        self.open += requests

    def next(self) -> Outcome:
        request = self.open.pop(0)
        found = self.answers[int(request.unit.config.as_dict()["BLOCK_SIZE_N"])]
        if isinstance(found, float):
            return Outcome(request.unit, request.rung, (found,))
        return Outcome(request.unit, request.rung, error=found[0], reason=found[1])

    def cancel(self) -> None:
        self.open.clear()


def _requests(*blocks: int, size: int = 1) -> list[Request]:
    return [Request(Unit(size, "up", _tile(block)), 0, 1) for block in blocks]


def test_the_most_frequent_failure_of_a_batch_size_is_told(tmp_path: Path) -> None:
    answers = _Answers({16: ("exception", "no file"), 32: ("crashed", ""), 64: ("exception", "no file"), 128: 9.0})
    with Journal.open(tmp_path / "journal", purpose=PURPOSE) as journal:
        measure(Journaled(answers, journal, "here"), _requests(16, 32, 64, 128))  # type: ignore[arg-type]
        measure(Journaled(answers, journal, "here"), _requests(32, size=2))  # type: ignore[arg-type]
        measure(Journaled(answers, journal, "here"), _requests(128, size=4))  # type: ignore[arg-type]
        assert most_frequent(journal, "here", 1) == "exception: no file"
        assert most_frequent(journal, "here", 2) == "crashed"
        assert most_frequent(journal, "here", 4) == most_frequent(journal, "there", 1) == ""


def test_progress_is_told_before_the_first_answer_and_meanwhile() -> None:
    stream = io.StringIO()
    answers = _Answers({16: ("crashed", "signal 11"), 32: 8.0})
    watched = Watched(answers, Progress(8, stream), every_s=0.0)  # type: ignore[arg-type]
    watched.submit(_requests(16, 32))
    assert stream.getvalue() == f"measuring up M=1 {_tile(16).spell()}, and others after it\n"
    assert [watched.next().error for _ in range(2)] == ["crashed", None]
    assert stream.getvalue().splitlines()[1:] == [
        f"1 answers, the last: up M=1 {_tile(16).spell()}: crashed",
        f"2 answers, the last: up M=1 {_tile(32).spell()}: 8.0 us",
    ]
    seldom = io.StringIO()
    measure(Watched(answers, Progress(8, seldom)), _requests(16, 32))  # type: ignore[arg-type]
    assert len(seldom.getvalue().splitlines()) == 1


def test_a_line_that_is_rewritten_fits_the_terminal() -> None:
    mine, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 40, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        progress = Progress(2, stream)
        progress.step("x" * 100)
        assert os.read(mine, 1000).decode() == "\r\x1b[2K" + "[1/2, 0 s, about 0 s left] ".ljust(39, "x")
        progress.say("y" * 100)
        assert "y" * 100 in os.read(mine, 1000).decode()
    os.close(mine)


def test_a_gain_is_told_only_over_a_default_that_is_slower() -> None:
    arena = Arena(1, ("up",))
    assert gain_words(arena, _tile(16)) == "nothing runs"
    arena.add([Outcome(Unit(1, "up", _tile(16)), 0, (10.0,))])
    assert gain_words(arena, _tile(16)) == "best 10.0 us, the default"
    assert gain_words(arena, _tile(32)) == "best 10.0 us"
    arena.add([Outcome(Unit(1, "up", _tile(32)), 0, (8.0,))])
    assert gain_words(arena, _tile(16)) == "best 8.0 us, 1.25x as fast as the default"


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([0.5] * 4, "inconclusive"),  # 87.5 %: as many as agree by chance once in eight times
        ([-0.5] * 3, "inconclusive"),
        ([0.0] * 4, "inconclusive"),
        ([0.5] * 5, "improved"),
        ([-0.5] * 5, "regressed"),
        ([0.0] * 5, "equivalent"),
        ([0.5, 0.5, 0.5, 0.5, -0.1], "inconclusive"),
    ],
)
def test_a_verdict_takes_five_processes(ratios: list[float], verdict: str) -> None:
    assert verdict_of(ratios, 0.01)[0] == verdict
