"""What a broken or hostile cell does to its host: the right verdict, the host unharmed, our memory bounded."""

import os
import time
from pathlib import Path

import pytest

from moegate import journal
from orchestrator.bundle import read_run
from orchestrator.commands._conclude import conclude
from orchestrator.pools.isolation.process import ProcessIsolation
from orchestrator.scheduler.state import run_id

MOST_MIB = 300
MATRIX = """\
schema: 1
name: small
images: {{i: {{reference: 'x@sha256:{digest}', env: {{FAKE_ONLY: verify={mode}}}}}}}
pools: {{cpu: {{device: cpu, ray: none, isolation: process, image: i}}}}
models: {{tiny: {{config: model, dtype: float32}}}}
cells:
  - {{kind: check, models: [tiny]}}
  - {{kind: kernel-test, pools: [cpu], dtypes: [float32], timeout: 2m}}
"""
# What the cell does, the state that it ends in, a word of the reason.
ROWS = [
    ("gigabyte", "PASSED", ""),
    ("noise", "PASSED", ""),
    ("forks", "PASSED", ""),
    ("files", "PASSED", ""),
    ("outside", "PASSED", ""),
    ("skipped", "FAILED", "no case was verified"),
    ("silent", "FAILED", "no result was written"),
    ("sparse", "FAILED", "bytes; at most"),
    ("fifo", "FAILED", "not a plain file"),
    ("symlink", "FAILED", "not a plain file"),
    ("folder", "FAILED", "not a plain file"),
    ("hardlink", "FAILED", "not JSON"),
    ("deep", "FAILED", "nested too deeply"),
    ("big-output", "FAILED", "too large"),
    ("output-outside", "FAILED", "leads outside its folder"),
    ("output-nul", "FAILED", "leads outside its folder"),
    ("output-long", "FAILED", "is missing"),
    ("output-locked", "FAILED", "declared output"),
    ("folder-locked", "PASSED", ""),
]


def hostile(run, mode: str) -> tuple[int, str, int]:
    """Run a check and a cell that does `mode`, as a process of its own: exit code, output, peak memory in MiB."""
    (run.repository / "matrix.yaml").write_text(MATRIX.format(digest="0" * 64, mode=mode))
    with run.start() as process:
        text = process.stdout.read()
    assert "\npeak " in text, text
    return process.returncode, text, int(text.rsplit("\npeak ", 1)[-1].split()[0])


@pytest.mark.parametrize(("mode", "state", "reason"), ROWS, ids=[row[0] for row in ROWS])
def test_the_right_verdict_and_the_host_unharmed(run, mode, state, reason):
    began = time.monotonic()
    code, text, peak_mib = hostile(run, mode)
    assert code == 0, text
    assert peak_mib < MOST_MIB
    assert time.monotonic() - began < 150
    check, cell = read_run(run.path).outcomes
    assert (check.state, cell.state) == ("PASSED", state), cell.reason
    assert reason in cell.reason
    assert conclude(run.path).exit == (0 if state == "PASSED" else 1)
    name = run_id(journal.read(run.path / "journal"))
    assert ProcessIsolation().reap(name) == 0, "nothing is left running"
    attempt = run.path / "cells" / cell.cell / "attempt-1"
    assert {path.name for path in attempt.iterdir()} <= {"result.json", "stdout.log", "stderr.log"}
    assert sum(path.stat().st_size for path in attempt.iterdir()) < 20 << 20
    report = (run.path / "report.html").read_text()
    assert "\x1b" not in report
    assert "::error::planted" not in (run.path / "summary.md").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which needs root")
def test_a_cell_that_fills_its_disk_fails_alone(run):
    import subprocess

    disk = run.repository / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this host does not let a test mount a tmpfs")
    try:
        run.path = disk / "run"
        code, text, _ = hostile(run, "fill")
        assert code == 0, text
        check, cell = read_run(run.path).outcomes
        assert (check.state, cell.state) == ("PASSED", "FAILED")
        assert "it filled the disk" in cell.reason
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_links_that_a_cell_leaves_are_removed_and_what_they_lead_to_stays(run):
    hostile(run, "outside")
    assert Path("/etc/passwd").is_file()
    assert not list(run.path.rglob("link"))
    conclude(run.path)
    assert "root:" not in (run.path / "report.html").read_text()


def test_the_next_cell_on_the_device_of_one_that_crashed_is_unaffected(run, states):
    run.edit(("tuned: {configs: tuned}", "tuned: {configs: tuned, env: {FAKE_ONLY: bench=segfault}}"))
    run()
    found = states(run.path)
    assert found.pop("kernel-bench/cpu/tiny/fused_experts/float32/moegate/triton/eager") == "CRASHED"
    assert set(found.values()) == {"PASSED"}


def test_a_secret_of_ours_that_a_cell_prints_is_masked_everywhere(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "s3cret-of-this-host")
    hostile(run, "tell")
    conclude(run.path)
    attempt = next(run.path.glob("cells/kernel-test-*/attempt-1"))
    assert "[masked]" in (attempt / "stderr.log").read_text()
    for path in (path for path in run.path.rglob("*") if path.is_file()):
        assert b"s3cret-of-this-host" not in path.read_bytes(), path


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("tree-locked", "in the tuned tree cannot be read"),
        ("tree-folder-locked", "no config file was written"),
        ("tree-read-only", "in the tuned tree cannot be read, or moved"),
    ],
)
def test_a_tuned_tree_that_cannot_be_read_fails_its_cell_alone(run, states, mode, words):
    image = f"images: {{i: {{reference: 'x@sha256:{'0' * 64}', env: {{FAKE_ONLY: tune={mode}}}}}}}"
    run.edit(("\npools:", f"\n{image}\npools:"), ("isolation: process", "isolation: process, image: i"))
    run()
    found = states(run.path)
    assert found.pop("tune/cpu/tiny/fused_experts/float32/moegate") == "FAILED"
    assert found.pop("check/tiny/moegate") == found.pop("kernel-test/cpu/fused_experts/float32") == "PASSED"
    assert set(found.values()) == {"BLOCKED"}
    assert any(words in outcome.reason for outcome in read_run(run.path).outcomes)
