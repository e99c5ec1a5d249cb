"""Every command of docs/runners.md: run with stand-ins for what only the host or GitHub has, or excused by name."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.pools import discovery, withdrawn

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "runners.md").read_text()
CARDS = {"0000:17:00.0": 2, "0000:1b:00.0": 0, "0000:97:00.0": 3, "0000:9b:00.0": 1}
HEAD = "c" * 40

# What cannot run in a test, by its beginning, and what stands for it.
EXCUSED = {
    "git clone <this repository> moegate": "the reader's own address",
    "sudo infra/host/setup-b60.sh  ": "changes the host; its dry run prints the same commands and is run",
    "make venv": "CI does it before any test runs",
    "make wheelhouse": "CI does it before any test runs",
    ".venv/bin/orchestrator run matrices/b60.yaml": "tests/integration/run/test_b60.py and docker/test_b60.py",
    "gh run download RUN --name history": "the artifact of a run on GitHub",
    "orchestrator history": "tests/unit/infra/test_verdict.py writes and lists a history by the same commands",
}


def commands() -> list[str]:
    """The commands of the page's console blocks that are not run by tests/unit/project, one per line."""
    found = []
    for block in re.findall(r"(?ms)^```console\n(.*?)^```", PAGE):
        text = re.sub(r"\\\n\s*", "", block)
        found += [line.removeprefix("$ ").split("   #")[0] for line in text.splitlines() if line.startswith("$ ")]
    return found


def excused(command: str) -> bool:
    return any(f"{command}  ".startswith(begin) for begin in EXCUSED)


def test_excuses_are_of_commands_that_are_there() -> None:
    for begin in EXCUSED:
        assert any(f"{command}  ".startswith(begin) for command in commands()), begin
    assert len([command for command in commands() if not excused(command)]) >= 7


STANDINS = {
    "sudo": '[ "$1" != -u ] || shift 2\nexec "$@"',
    "gh": 'echo "$@" >>"$LOG"\ncase "$1 $2" in\n  "pr view") echo ' + HEAD + ";;\n  api*) echo encoded-config;;\nesac",
    "ssh": 'shift\necho "ssh $*" >>"$LOG"\nbash -c "$*"',
    "systemctl": 'echo "systemctl $*" >>"$LOG"',
    "docker": '[ "$1" = version ] && echo 29.0.0\nexit 0',
    "fuser": "exit 1",
    "df": "echo Avail; echo 500",
}


@pytest.fixture
def host(simulated_host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A B60 host of four cards, with stand-ins for GitHub's client, ssh, root's tools and the runner's account."""
    simulated_host.intel(CARDS)
    for name, text in STANDINS.items():
        simulated_host.tool(name, text + "\n", shell="/bin/bash")
    home = tmp_path / "home"
    (home / "actions-runner").mkdir(parents=True)
    for name, value in {
        "LOG": str(tmp_path / "log"),
        "HOME": str(home),
        "MOEGATE_LOCK_DIR": str(tmp_path / "locks"),
    }.items():
        monkeypatch.setenv(name, value)
    return simulated_host.root


@pytest.mark.parametrize("command", [command for command in commands() if not excused(command)])
def test_a_command_of_the_page_runs(command: str, host: Path, tmp_path: Path) -> None:
    if "--release" in command:
        withdrawn.mark(discovery.devices("xpu", 1)[0], "it was lost")
    line = command.replace(".venv/bin/", f"{shlex.quote(str(Path(sys.executable).parent))}/").replace(
        "~moegate-runner", "~"
    )
    line = re.sub(r"infra/host/health\.sh", f"infra/host/health.sh --dri {host}/dev/dri --sys {host}/sys", line)
    argv = ["bash", "-euo", "pipefail", "-c", line]
    done = subprocess.run(
        argv, cwd=ROOT, env=os.environ.copy(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "doctor" in command:
        assert "Intel(R) Arc(TM) Pro B60 Graphics (0000:17:00.0)" in done.stdout
    if "health.sh" in command:
        assert all(address in done.stdout for address in CARDS)
    said = (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""
    if "jitconfig" in command:
        assert (tmp_path / "home" / "actions-runner" / "jit.conf").read_text() == "encoded-config\n"
        assert "labels[]=b60" in said
    if "workflow run" in command:
        inputs = yaml.load((ROOT / ".github/workflows/gate.yml").read_text(), Loader=yaml.BaseLoader)
        asked = dict(re.findall(r"-f (\w+)=(\S+)", said))
        assert set(asked) == set(inputs["on"]["workflow_dispatch"]["inputs"])
        assert asked["head_sha"] == HEAD
    if "--release" in command:
        assert json.dumps(sorted(withdrawn.marks())) == "[]"
