"""Streams and files of all three commands: where an answer is, and what is said before a file is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from moegate.errors import UsageError
from moegate.records import Case, Measurement, read
from orchestrator.cli import app as orchestrator
from serving.cli import _say
from serving.cli import app as serving
from tuner import checks
from tuner.cli import app as tuner
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


LOAD = ("--requests=1", "--input=1", "--output=1", "--concurrency=1")
# Each ends with exit 2 for another reason than its file, before any work.
WRITING: tuple[tuple[typer.Typer, tuple[str, ...], str], ...] = (
    (tuner, ("tune", "--out=.", "--shape=E=1"), "--result"),
    (tuner, ("bench", "--shape=E=1"), "--out"),
    (tuner, ("verify", "--ops=none"), "--out"),
    (tuner, ("compile", "--targets=none"), "--out"),
    (serving, ("bench", *LOAD, "--base-url=x"), "--out"),
    (serving, ("bench", *LOAD, "--base-url=x", "--out=x.json"), "--events"),
    (serving, ("accuracy", "--samples=none"), "--out"),
    (serving, ("launch", "--model=none"), "--announce"),
    (serving, ("launch", "--model=none"), "--server-log"),
    (orchestrator, ("check", "--engine=none"), "--out"),
    (orchestrator, ("check", "--engine=none"), "--sarif"),
)


@pytest.mark.parametrize(("app", "words", "option"), WRITING)
def test_a_file_is_looked_at_before_the_work_and_a_new_folder_is_said(
    app: typer.Typer, words: tuple[str, ...], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "0" if "compile" in words else "1")
    done = CliRunner().invoke(app, [*words, f"{option}={tmp_path / 'no' / 'such' / 'x.json'}"])
    assert f"note: there is no folder {tmp_path / 'no'} yet: it will be made for x.json\n" in done.stderr
    assert done.stdout == ""
    assert done.exit_code
    assert not (tmp_path / "no").exists()
    here = CliRunner().invoke(app, [*words, f"{option}={tmp_path / 'x.json'}"])
    assert "note: " not in here.stderr
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(app, [*words, f"{option}={tmp_path / 'file' / 'x.json'}"])
    assert isinstance(refused.exception, UsageError)
    told = refused.exception
    assert (told.file, told.field, told.message) == (str(tmp_path / "file"), option, "is no folder")
