"""Odd places and poor hosts: the run works, or ends with a clear word and can be resumed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moegate import journal
from orchestrator.bundle import read_run

DRIVER = Path(__file__).with_name("driver.py")
DRIVER_ENV = {"PATH": os.environ["PATH"], "PYTHONWARNINGS": "error"}


def test_a_path_with_spaces_and_other_letters_under_lang_c(run, tmp_path, monkeypatch):
    odd = tmp_path / "ein Ort, größer = 'x' $HOME"
    shutil.move(run.repository, odd)
    argv = [sys.executable, "-P", str(DRIVER), str(odd), str(odd / "out put")]
    env = {
        **DRIVER_ENV,
        "LANG": "C",
        "LC_ALL": "C",
        "MOEGATE_LOCK_DIR": os.environ["MOEGATE_LOCK_DIR"],
        "HOME": "/nowhere",
    }
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert {outcome.state for outcome in read_run(odd / "out put").outcomes} == {"PASSED"}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which needs root")
@pytest.mark.parametrize("kib", [16, 40, 90])
def test_a_full_disk_ends_the_run_and_room_lets_it_go_on(run, kib):
    disk = run.repository / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("this host does not let a test mount a tmpfs")
    try:
        run.path = disk / "run"
        text, _ = (process := run.start()).communicate(timeout=120)
        assert process.returncode != 0
        assert "No space left" in text
        if (run.path / "journal").is_file():
            journal.read(run.path / "journal")  # torn at most, never damaged
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        text, _ = (process := run.start(resume=run.path.is_dir())).communicate(timeout=120)
        assert process.returncode == 0, text
        assert {outcome.state for outcome in read_run(run.path).outcomes} == {"PASSED"}
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_read_only_place_is_said_before_anything_runs(run, tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    run.path = blocked / "run"
    from moegate.errors import InfraError

    with pytest.raises(InfraError, match="cannot be made"):
        run("check/*")


def test_standard_error_that_goes_away_does_not_end_a_run(run):
    process = run.start()
    assert process.stdout
    process.stdout.close()
    process.wait(timeout=120)
    assert {outcome.state for outcome in read_run(run.path).outcomes} == {"PASSED"}


def test_a_module_in_the_working_directory_is_never_imported(run, tmp_path, monkeypatch):
    for name in ("moegate", "json", "tuner", "torch", "kernels"):
        (run.repository / f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "orchestrator", "plan", str(run.repository / "matrix.yaml"), "--json"],
        capture_output=True, text=True, cwd=run.repository, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["cells"]) == 6


def driver(run) -> list[str]:
    """The command that runs the two quickest kinds of a repository's matrix with the stand-in programs."""
    only = ("--only=check/*", "--only=kernel-test/*")
    return [sys.executable, "-P", str(DRIVER), str(run.repository), str(run.path), *only]


def absent(folder, *modules: str) -> dict[str, str]:
    """A search path on which these modules cannot be imported."""
    folder.mkdir()
    for name in modules:
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name='{name}')\n")
    return {"PYTHONPATH": str(folder)}


# How a poor host is made of this one: what comes before the command, what is in its environment.
POOR_HOSTS = {
    "one core": (["taskset", "--cpu-list", "0"], {}),
    "no network": (["unshare", "--net"], {}),
    "read-only home": ([], {"HOME": "/proc/sys", "TMPDIR": "/tmp"}),
    "no home": (["env", "--unset=HOME"], {}),
    "C locale": ([], {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}),
    "no Docker": ([], {"DOCKER_HOST": "unix:///nowhere/docker.sock"}),
    "no terminal": (["setsid"], {"TERM": "dumb"}),
    "no standard streams": (["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"], {}),
}


@pytest.mark.parametrize("name", POOR_HOSTS)
def test_a_run_on_a_poor_host(run, name):
    prefix, env = POOR_HOSTS[name]
    if prefix and subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip(f"{prefix[0]} is not allowed here")
    run.edit(("isolation: process", "isolation: auto"))
    done = subprocess.run(
        [*prefix, *driver(run)], capture_output=True, text=True, env={**os.environ, **env}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert {outcome.state for outcome in read_run(run.path).outcomes} == {"PASSED"}


# What a host may lack: what the pool says then, what is missing in the search path, what the person is told.
LACKS = [
    ("isolation: docker, image: i", (), "Docker"),
    ("ray: local", ("ray",), "python -m pip install -e '.[ray]'"),
    ("device: cuda", (), "nvidia-smi"),
    ("device: rocm", (), "rocm-smi"),
    ("device: xpu", (), "dpctl"),
]


@pytest.mark.parametrize(("pool", "modules", "told"), LACKS, ids=[row[0] for row in LACKS])
def test_what_a_pool_lacks_is_named_and_the_rest_runs(run, tmp_path, pool, modules, told):
    key = pool.partition(":")[0]
    values = {"device": "cpu", "ray": "none", "isolation": "process"}
    values.pop(key, None)
    rest = "".join(f", {name}: {value}" for name, value in values.items())
    run.edit(
        ("pools:\n", f"images: {{i: {{reference: 'x@sha256:{'0' * 64}'}}}}\npools:\n  poor: {{{pool}{rest}}}\n"),
        ("  - kind: check", "  - {kind: kernel-test, pools: [poor], dtypes: [float16]}\n  - kind: check"),
    )
    env = {**os.environ, "DOCKER_HOST": "unix:///nowhere/docker.sock", **absent(tmp_path / "absent", *modules)}
    done = subprocess.run(driver(run), capture_output=True, text=True, env=env, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    labels = {cell.id: cell.label for cell in read_run(run.path).plan.cells}
    ends = {labels[outcome.cell]: outcome for outcome in read_run(run.path).outcomes}
    blocked = ends.pop("kernel-test/poor/fused_experts/float16")
    assert blocked.state == "BLOCKED"
    assert told in blocked.reason
    assert {outcome.state for outcome in ends.values()} == {"PASSED"}


# Commands that need none of torch, Triton, Ray, Docker or a browser; and what those that do say without it.
LIGHT = [
    ("orchestrator", "plan", "matrix.yaml"),
    ("orchestrator", "check"),
    ("orchestrator", "explain", "--model=model", "--device=cpu", "--triton=3.8.0"),
    ("orchestrator", "dispatch", "show", "--op=fused_experts", "--platform=cpu"),
    ("orchestrator", "doctor"),
    ("orchestrator", "schema"),
]
HEAVY = [
    ("tuner", "verify", "--ops=topk", "--out=result.json"),
    ("serving", "launch", "--engine=moegate", "--model=model", "--", "true"),
]
ABSENT = ("torch", "triton", "ray", "uvicorn", "aiohttp", "safetensors")


@pytest.mark.parametrize("command", LIGHT, ids=" ".join)
def test_the_control_plane_needs_none_of_it(run, tmp_path, command):
    env = {**os.environ, **absent(tmp_path / "absent", *ABSENT), "PATH": "/nowhere"}
    argv = [sys.executable, "-P", "-m", *command]
    done = subprocess.run(argv, cwd=run.repository, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", HEAVY, ids=" ".join)
def test_what_needs_torch_says_so(run, tmp_path, command):
    env = {**os.environ, **absent(tmp_path / "absent", *ABSENT)}
    argv = [sys.executable, "-P", "-m", *command]
    done = subprocess.run(argv, cwd=run.repository, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert any(f"{word}" in done.stderr for word in ("torch", "uvicorn", "pip install -e")), done.stderr
