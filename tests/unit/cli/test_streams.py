"""Which stream a command's answer is on: standard output; with `--json` that holds one document and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moegate.records import Case, Measurement, read
from serving.cli import _say
from tuner import checks
from tuner.commands.verify import run as verify


def _check(dtype: str, backend: str, shape: Any) -> Case:
    bad = shape.tokens == 7
    return Case(f"op tokens={shape.tokens}", "failed" if bad else "passed", "off by 9" if bad else "")


@pytest.mark.parametrize("as_json", [False, True])
def test_verify_says_on_standard_output_which_cases_failed(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(checks, "CHECKS", {"op": _check})
    out = tmp_path / "result.json"
    assert verify(ops="op", dtypes="float32", backend="torch", out=out, as_json=as_json) == 1
    told = capsys.readouterr()
    words = "failed: op tokens=7: off by 9\n3 of 4 cases passed, 0 skipped\n"
    assert (told.err if as_json else told.out) == words
    assert (json.loads(told.out)["status"] == "failed") if as_json else not told.err
    assert read(Measurement, out).failure == "1 of 4 cases failed, first op tokens=7: off by 9"


def test_a_load_says_its_numbers_on_standard_output_and_what_voids_it_on_the_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _say({"completed": 8, "mean_ttft_ms": 1.5}, "short requests", False)
    told = capsys.readouterr()
    assert [line.split() for line in told.out.splitlines()] == [["completed", "8"], ["mean_ttft_ms", "1.5"]]
    assert told.err == "void: short requests\n"
    _say({"completed": 8}, "short requests", True)
    told = capsys.readouterr()
    assert (json.loads(told.out), told.err) == ({"completed": 8, "void_reason": "short requests"}, "")
