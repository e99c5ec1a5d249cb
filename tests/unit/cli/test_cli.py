"""The command line as such: light, complete, one JSON document where it was asked for."""

import importlib
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from typer.main import get_command

from moegate.errors import UsageError
from moegate.journal import Journal
from moegate.records import GatePolicy, Plan, write
from orchestrator.cli import COMMANDS, app

HEAVY = ("torch", "triton", "ray", "scipy", "numpy", "pydantic", "docker", "jinja2", "yaml")


def orchestrator(*argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "orchestrator", *argv], capture_output=True, text=True, cwd=cwd, timeout=120
    )


def children_cpu_s() -> float:
    """Processor seconds of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_importing_the_command_line_loads_nothing_heavy():
    program = f"import sys, orchestrator.cli; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("program", ["orchestrator", "tuner", "serving"])
def test_every_program_knows_the_short_word_for_help(program: str):
    command = get_command(importlib.import_module(f"{program}.cli").app)
    for words in (["-h"], [next(iter(command.commands)), "-h"]):  # type: ignore[attr-defined]
        done = CliRunner().invoke(command, words)
        assert done.exit_code == 0, done.output
        assert "Usage:" in done.output


def test_help_is_quick():
    times = []
    for _ in range(3):
        began = children_cpu_s()
        assert orchestrator("--help").returncode == 0
        times.append(children_cpu_s() - began)
    # Processor time, which others on the machine take nothing of: about 0.15 s.
    assert min(times) < 0.6, times


def test_every_command_is_there_and_shows_an_example():
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert set(commands) == set(COMMANDS)
    assert len(COMMANDS) == len(set(COMMANDS))
    for name, command in commands.items():
        assert "orchestrator" in (command.epilog or ""), f"{name} shows no example"
        leaves = getattr(command, "commands", None) or {name: command}
        for leaf in leaves.values():
            assert leaf.help, name
            assert "orchestrator" in (leaf.epilog or leaf.help), f"{name} shows no example"


def test_an_unknown_option_is_exit_2_without_a_traceback():
    done = orchestrator("run", "--no-such-option")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_bad_isolation_is_exit_2(tmp_path):
    done = orchestrator("run", "matrix.yaml", "--isolation=vm", cwd=tmp_path)
    assert done.returncode == 2
    assert "one of auto, docker, process" in done.stderr


BARE = """\
schema: 1
name: bare
pools:
  none: {device: cpu, ray: none}
  imaged: {device: cpu, ray: none, image: here}
images: {here: {reference: "REFERENCE"}}
models: {}
cells:
  - {kind: kernel-test, pools: [none, imaged], dtypes: [float32]}
""".replace("REFERENCE", "name@sha256:" + "0" * 64)


@pytest.mark.parametrize(("only", "refused"), [((), True), (("--only=*none*",), True), (("--only=*imaged*",), False)])
def test_docker_for_a_pool_without_an_image_is_refused_before_anything_runs(tmp_path, monkeypatch, only, refused):
    (tmp_path / "bare.yaml").write_text(BARE)
    monkeypatch.chdir(tmp_path)
    ran = []
    monkeypatch.setattr("orchestrator.scheduler.execute", lambda plan, *_, **__: ran.append(plan) or sys.exit(7))
    done = CliRunner().invoke(get_command(app), ["run", "bare.yaml", "--isolation=docker", "--out=r", *only])
    if not refused:
        assert (done.exit_code, len(ran)) == (7, 1)
        return
    assert isinstance(done.exception, UsageError)
    assert (done.exception.file, done.exception.field, ran) == ("bare.yaml", "--isolation", [])
    assert done.exception.message == "docker needs an image, and pool none names none"
    assert not (tmp_path / "r").exists()


def test_the_schema_is_one_json_document():
    done = orchestrator("schema")
    assert json.loads(done.stdout)["title"] == "moegate matrix"


@pytest.fixture
def empty_run(tmp_path: Path) -> Path:
    plan = Plan("demo", "m.yaml", "0" * 64, "2027-01-01", "0", (), (), (), (), (), None, GatePolicy())
    write(tmp_path / "plan.json", plan)
    with Journal.open(tmp_path / "journal") as journal:
        journal.append("run", run="ab", matrix="0" * 64, version="0", cells=0)
        journal.append("note", text="\x1b[31mred\u202e")
    return tmp_path


def test_journal_show_and_verify(empty_run):
    shown = orchestrator("journal", "show", str(empty_run))
    assert shown.returncode == 0
    assert "\x1b" not in shown.stdout
    entries = json.loads(orchestrator("journal", "show", str(empty_run), "--json").stdout)
    assert [entry["kind"] for entry in entries] == ["journal", "run", "note"]
    assert json.loads(orchestrator("journal", "verify", str(empty_run), "--json").stdout)["intact"] is True
    file = empty_run / "journal"
    file.write_bytes(file.read_bytes().replace(b'"cells":0', b'"cells":9'))
    done = orchestrator("journal", "verify", str(empty_run))
    assert done.returncode == 2
    assert "entry 1 is damaged" in done.stderr


def test_status_and_cancel_of_a_run_that_nobody_holds(empty_run):
    status = json.loads(orchestrator("status", str(empty_run), "--json").stdout)
    assert (status["running"], status["cells"]) == (False, [])
    done = orchestrator("cancel", str(empty_run))
    assert (done.returncode, done.stdout.strip()) == (0, "no orchestrator is running it")
    assert not (empty_run / "cancel").exists()
    told = json.loads(orchestrator("cancel", str(empty_run), "--json").stdout)
    assert told == {"run": str(empty_run), "stopped": False}


@pytest.mark.parametrize("command", ["status", "report", "cancel"])
def test_a_folder_that_is_no_run_is_exit_2(tmp_path, command):
    done = orchestrator(command, str(tmp_path))
    assert done.returncode == 2
    assert "is not a run directory" in done.stderr


def test_prune_removes_old_runs_and_nothing_else(tmp_path, empty_run):
    import os
    import shutil

    runs = tmp_path / "runs"
    for name in ("old", "new"):
        shutil.copytree(empty_run, runs / name, ignore=shutil.ignore_patterns("runs"))
    (runs / "foreign").mkdir()
    os.utime(runs / "old" / "journal", (0, 0))
    dry = json.loads(orchestrator("prune", "--runs", str(runs), "--no-docker", "--dry-run", "--json").stdout)
    assert dry["removed"]["runs"] == [str(runs / "old")]
    assert (runs / "old").is_dir()
    assert orchestrator("prune", "--runs", str(runs), "--no-docker").returncode == 0
    assert {path.name for path in runs.iterdir()} == {"new", "foreign"}
    assert orchestrator("prune", "--older", "soon").returncode == 2


def test_doctor_says_what_every_missing_piece_costs():
    from orchestrator.doctor import PROBES

    document = json.loads(orchestrator("doctor", "--json").stdout)
    assert [finding["name"] for finding in document["findings"]] == [probe.name for probe in PROBES]
    for finding in document["findings"]:
        assert finding["present"] or (finding["cost"] and finding["fix"] and finding["detail"])


def test_a_table_obeys_no_text_of_others() -> None:
    from orchestrator.commands._output import table

    lines = table([("a\x1b[2J", "x\n::error::y"), ("bb", "\u202e")], head=("h", "i")).splitlines()
    assert lines == ["h         i", r"a\x1b[2J  x\n::error::y", r"bb        \u202e"]
