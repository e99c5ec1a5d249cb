"""Timing a decode step: what it says of itself, and numbers that it cannot time."""

from __future__ import annotations

import json

import pytest

from moegate.errors import UsageError
from serving.server import steptime

MODEL = ["--model", "examples/models/tiny-moe"]


@pytest.mark.parametrize("graph", ["full", "eager"])
def test_the_decode_is_timed_at_the_context_that_was_asked_for(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert steptime.main([*MODEL, "--graph", graph, "--context", "12", "--steps", "2", "--batch-sizes", "2,1"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [row["batch"] for row in said["batches"]] == [2, 1]
    assert [row["decode_context"] for row in said["batches"]] == [12, 12]
    for row in said["batches"]:
        assert row["decode_ms"] > 0
        assert row["step_ms"] > 0
        assert row["floor_ms"] is None, "no bandwidth of this machine is known"


@pytest.mark.parametrize(
    "wrong",
    [["--steps", "0"], ["--steps=-3"], ["--context", "x"], ["--batch-sizes", "0"], ["--batch-sizes", "1,,2"],
     ["--batch-sizes", "x"]],
)  # fmt: skip
def test_numbers_that_cannot_be_timed_are_exit_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        steptime.main([*MODEL, *wrong])
    assert left.value.code == 2
    assert "is no number from 1 to" in capsys.readouterr().err


def test_more_positions_than_the_model_has_are_refused_in_terms_of_the_options() -> None:
    with pytest.raises(UsageError, match=r"--context: 256 tokens and 6 times 50 steps take 563 positions.*--steps"):
        steptime.main([*MODEL, "--graph", "full", "--batch-sizes", "1,16"])


def test_warming_up_has_to_leave_a_prompt() -> None:
    with pytest.raises(UsageError, match="leave no prompt before 5 steps"):
        steptime.main([*MODEL, "--context", "6", "--steps", "5"])
