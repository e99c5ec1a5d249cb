"""What would pass without having been looked at: refused with exit 2, naming the option or the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from moegate.configs import ConfigKey
from moegate.errors import UsageError
from orchestrator.cli import app

KEY = ConfigKey(64, 896, "NVIDIA_H200")
INSIDE = (None, "notes.json", "build/E=1,N=1,device_name=cpu.json", "triton_3_8_0/README")
CHECKED = ("store_kv_cache,heads=8.json", "E=1.json", "triton_3_8/E=1,N=1,device_name=cpu.json")


def check(*words: object) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, words)])


def refusal(done: Result) -> UsageError:
    assert isinstance(done.exception, UsageError), done.output
    assert done.stdout == ""
    return done.exception


@pytest.mark.parametrize("inside", INSIDE)
def test_a_folder_without_a_config_file_does_not_pass(tmp_path: Path, inside: str | None) -> None:
    if inside is not None:
        (tmp_path / inside).parent.mkdir(exist_ok=True)
        (tmp_path / inside).write_text("{}")
    (tmp_path / "base").mkdir()
    for words in ((), ("--base", tmp_path / "base")):
        error = refusal(check("--configs", tmp_path, "--json", *words))
        assert (error.file, error.field) == (str(tmp_path), "--configs")
        assert error.message.startswith("holds no config file: looked for E=..,N=..,device_name=..")


@pytest.mark.parametrize("name", CHECKED)
def test_a_folder_with_one_file_that_a_rule_looks_at_is_checked(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    assert json.loads(check("--configs", tmp_path, "--json").stdout)["findings"]


def test_a_folder_that_lost_all_its_files_is_a_finding(repo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo.root)
    for file in repo.configs.rglob("*.json"):
        file.unlink()
    done = check("--configs", repo.configs, "--base", "git:main", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["counts"]["coverage-lost"] == 4
    refusal(check("--configs", repo.configs))


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        *(((option, word), "--models") for option, word in (("--devices", "NVIDIA_H200"), ("--tp", "1"), ("--ep", "2"),
                                                            ("--dtype", "float32"), ("--backend", "auto"))),
        (("--only-new",), "--base"),
    ],
)  # fmt: skip
def test_an_option_that_counts_only_with_another_is_not_ignored(words: tuple[str, ...], needs: str) -> None:
    error = refusal(check(*words))
    assert (error.field, error.message) == (words[0], f"counts only with {needs}")


@pytest.mark.parametrize(
    ("words", "field", "meant"),
    [
        (("--devices", "NVIDIA_H200,MI300X"), "--devices", "did you mean AMD_Instinct_MI300X"),
        (("--devices", "nvidia_h200"), "--devices", "did you mean NVIDIA_H200?"),
        (("--devices", "banana"), "--devices", "`orchestrator doctor` prints the name"),
        (("--backend", "tritn"), "--backend", "did you mean triton?"),
    ],
)
def test_no_coverage_is_shown_of_what_is_no_device_or_backend(
    repo: Any, words: tuple[str, ...], field: str, meant: str
) -> None:
    error = refusal(check("--configs", repo.configs, "--models", repo.model, *words))
    assert error.field == field
    assert str(error.fix).startswith(meant)


def test_a_device_that_only_config_files_know_is_covered(repo: Any) -> None:
    repo.write(repo.file(KEY.on("Wafer")), repo.file(KEY).read_text())
    done = check("--configs", repo.configs, "--models", repo.model, "--devices", "Wafer", "--json")
    assert [row["device"] for row in json.loads(done.stdout)["coverage"]] == ["Wafer"]
