"""The GitHub workflows: clean under zizmor, pinned, least privilege, and closed where something is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(path: Path) -> dict[str, Any]:
    # As text: YAML 1.1 would read the key `on` as true.
    document: dict[str, Any] = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    return document


def steps(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in document["jobs"].values() for step in job["steps"]]


def name(path: Path) -> str:
    return path.name


def test_zizmor_finds_nothing_as_an_auditor() -> None:
    linter = Path(sys.executable).with_name("zizmor")
    argv = [str(linter), "--offline", "--no-progress", "--persona", "auditor", ".github", "action.yml"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def actionlint(*paths: Path) -> subprocess.CompletedProcess[str]:
    argv = [str(ROOT / "scripts" / "actionlint.sh"), *map(str, paths)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    # A registry that is down says nothing about our workflows; a machine without Node in CI is a fault of its set-up.
    if done.returncode == 3 and ("cannot be reached" in done.stderr or os.environ.get("CI") != "true"):
        pytest.skip(done.stderr.strip())
    return done


def test_actionlint_finds_nothing_and_would_find_something(tmp_path: Path) -> None:
    done = actionlint()
    assert done.returncode == 0, done.stdout + done.stderr
    bad = tmp_path / "bad.yml"
    bad.write_text(BAD)
    done = actionlint(bad)
    assert done.returncode == 1, done.stderr
    for words in ("potentially untrusted", 'label "b61" is unknown', 'needs job "nobody"', "unexpected key"):
        assert words in done.stdout, words
    assert 'label "ubuntu-24.04" is unknown' not in done.stdout


BAD = """\
on: pull_request
jobs:
  one:
    runs-on: ubuntu-24.04
    needs: [nobody]
    steps:
      - run: echo ${{ github.event.pull_request.title }}
  two:
    runs-on: [self-hosted, b61]
    timeout: 3
    steps: [{run: "true"}]
"""


@pytest.mark.parametrize("path", WORKFLOWS, ids=name)
def test_permissions_pins_and_deadlines(path: Path) -> None:
    document = load(path)
    assert document["permissions"] == {}
    assert "pull_request_target" not in document["on"]
    for job in document["jobs"].values():
        assert int(job["timeout-minutes"]) > 0
        assert "permissions" in job
    for step in steps(document):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w./-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
        if str(step.get("uses", "")).startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] == "false"
        assert "${{" not in step.get("run", ""), step


@pytest.mark.parametrize("path", WORKFLOWS, ids=name)
def test_every_script_that_is_called_exists(path: Path) -> None:
    for step in steps(load(path)):
        for found in re.findall(r"(?:base/)?((?:infra|scripts|\.ci)/[\w./-]+)", step.get("run", "")):
            assert (ROOT / found).is_file(), found


def test_self_hosted_runners_never_answer_to_a_pull_request() -> None:
    for path in WORKFLOWS:
        document = load(path)
        hosts = [job["runs-on"] for job in document["jobs"].values()]
        if any("self-hosted" in host for host in hosts):
            assert not {"pull_request", "push"} & set(document["on"]), path.name


def test_the_gate_runs_the_base_branchs_code_only() -> None:
    document = load(ROOT / ".github" / "workflows" / "gate.yml")
    for job in document["jobs"].values():
        for step in job["steps"]:
            assert "head/" not in step.get("run", ""), "nothing of the pull request is executed by a workflow"
    assert document["jobs"]["measure"]["environment"] == "gpu"
    assert document["jobs"]["measure"]["permissions"] == {"contents": "read"}
    assert document["jobs"]["verdict"]["if"] == "always()"


@pytest.mark.parametrize("file", ["gate.yml", "nightly.yml"])
def test_a_skipped_or_cancelled_measurement_is_judged(file: str) -> None:
    jobs = load(ROOT / ".github" / "workflows" / file)["jobs"]
    last = jobs["verdict"]
    assert last["if"] == "always()"
    assert set(last["needs"]) == set(jobs) - {"verdict", "history"}
    assert any("infra/ci/verdict.py" in step.get("run", "") for step in last["steps"])


def test_every_night_goes_into_the_history_that_the_night_before_left() -> None:
    job = load(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]["history"]
    assert job["if"] == "always()"
    restored, saved = (
        next(step["with"] for step in job["steps"] if step.get("uses", "").startswith(f"actions/cache/{what}@"))
        for what in ("restore", "save")
    )
    assert restored["path"] == saved["path"] == "history.sqlite"
    assert restored["key"] == saved["key"], "a new name each night, because a cache is never overwritten"
    assert saved["key"].startswith(restored["restore-keys"])


def test_the_action_passes_inputs_through_the_environment() -> None:
    document = load(ROOT / "action.yml")
    for step in document["runs"]["steps"]:
        assert "${{" not in step["run"]
    used = " ".join(str(step.get("env", {})) for step in document["runs"]["steps"])
    for key in document["inputs"]:
        assert f"inputs.{key}" in used, key
