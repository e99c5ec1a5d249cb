"""The helpers that workflows and runner hosts call, run as they are, on made-up hosts and repositories."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.pools.ray import resource_name
from orchestrator.scheduler import keys

ROOT = Path(__file__).resolve().parents[3]
CI, HOST = ROOT / "infra" / "ci", ROOT / "infra" / "host"
PYTHON = shlex.quote(sys.executable)


def run(*argv: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(item) for item in argv],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# The check step of the action


def test_inputs_become_one_command_line_and_nothing_else(tmp_path: Path) -> None:
    recorder = program(tmp_path / "bin", "orchestrator", '#!/bin/sh\nprintf "%s\\n" "$@"\nexit 1\n')
    env = {
        "ENGINE": "sglang",
        "CONFIGS": "a folder\n$(touch owned)\n",
        "BASE": "git:origin/main",
        "SARIF": "x.sarif",
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "MODELS": "",
    }
    done = run(CI / "check.sh", recorder, cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "check",
        "--github",
        "--engine=sglang",
        "--sarif=x.sarif",
        "--configs=a folder",
        "--configs=$(touch owned)",
        "--base=git:origin/main",
        "--only-new",
    ]
    assert not (tmp_path / "owned").exists()
    assert (tmp_path / "output").read_text() == "sarif=x.sarif\n"


def test_the_real_check_runs_through_it(tmp_path: Path) -> None:
    orchestrator = program(tmp_path, "orchestrator", f'#!/bin/sh\nexec {PYTHON} -P -m orchestrator "$@"\n')
    done = run(CI / "check.sh", orchestrator, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "moegate-check.sarif").read_text())["version"] == "2.1.0"


# The pinned head


GH = """\
#!/bin/sh
echo "$@" >>"{log}"
echo "{answer}"
"""


@pytest.mark.parametrize(
    ("pull", "sha", "answer", "code"),
    [
        ("12", "a" * 40, "a" * 40 + " open", 0),
        ("12", "a" * 40, "b" * 40 + " open", 2),
        ("12", "a" * 40, "a" * 40 + " closed", 2),
        ("12; rm -rf x", "a" * 40, "", 2),
        ("12", "main", "", 2),
    ],
)
def test_only_the_reviewed_head_goes_on(tmp_path: Path, pull: str, sha: str, answer: str, code: int) -> None:
    program(tmp_path / "bin", "gh", GH.format(log=tmp_path / "log", answer=answer))
    env = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PULL_REQUEST": pull,
        "HEAD_SHA": sha,
        "GITHUB_REPOSITORY": "o/r",
    }
    assert run(CI / "pinned-head.sh", cwd=tmp_path, env=env).returncode == code


def test_a_status_is_one_line_about_one_commit(tmp_path: Path) -> None:
    program(tmp_path / "bin", "gh", GH.format(log=tmp_path / "log", answer=""))
    env = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HEAD_SHA": "c" * 40,
        "STATE": "failure",
        "TEXT": "serve regressed\n::error::injected " + "x" * 300,
        "GITHUB_REPOSITORY": "o/r",
        "GITHUB_SERVER_URL": "https://example.invalid",
        "GITHUB_RUN_ID": "1",
    }
    assert run(CI / "status.sh", cwd=tmp_path, env=env).returncode == 0
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert f"repos/o/r/statuses/{'c' * 40}" in line
    assert run(CI / "status.sh", cwd=tmp_path, env={**env, "STATE": "great"}).returncode == 2


def test_both_commits_get_a_name_and_nothing_of_the_head_runs(tmp_path: Path) -> None:
    def git(folder: Path, *argv: str) -> str:
        done = run("git", "-c", "user.name=x", "-c", "user.email=x@example.invalid", *argv, cwd=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    base, head = tmp_path / "base", tmp_path / "head"
    base.mkdir()
    git(base, "init", "-q", "-b", "main")
    (base / "file").write_text("one")
    git(base, "add", ".")
    git(base, "commit", "-qm", "one")
    git(tmp_path, "clone", "-q", str(base), str(head))
    (head / "file").write_text("two")
    git(head, "commit", "-qam", "two")
    assert run(CI / "refs.sh", base, head, cwd=tmp_path).returncode == 0
    assert git(base, "rev-parse", "gate-base") == git(base, "rev-parse", "HEAD")
    assert git(base, "rev-parse", "gate-head") == git(head, "rev-parse", "HEAD")
    assert (base / "file").read_text() == "one"


def test_the_gates_matrix_is_planned_from_the_two_refs(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    run("git", "clone", "-q", "--no-hardlinks", "--depth=1", f"file://{ROOT}", clone, cwd=tmp_path)
    argv = (sys.executable, "-P", "-m", "orchestrator", "plan", "matrices/gate-b60.yaml", "--json")
    done = run(*argv, cwd=clone)
    assert (done.returncode, "no commit is called gate-base" in done.stderr) == (2, True)
    assert run(CI / "refs.sh", clone, clone, cwd=tmp_path).returncode == 0
    done = run(*argv, cwd=clone)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [cell["kind"] for cell in plan["cells"]] == ["kernel-test", "kernel-bench", "serve"]
    assert all(cell["why"] for cell in plan["cells"])
    head = run("git", "rev-parse", "HEAD", cwd=clone).stdout.strip()
    assert {arm["source"] for arm in plan["arms"]} == {head}


# The runner host


def card(root: Path, address: str, node: str, *, driver: str = "xe", device: str = "0xe211") -> None:
    """A card as the kernel shows it: a render node by path, its driver, id and clock limits."""
    dri, sys_ = root / "dri", root / "sys"
    (dri / "by-path").mkdir(parents=True, exist_ok=True)
    (dri / node).write_text("")
    (dri / "by-path" / f"pci-{address}-render").symlink_to(dri / node)
    home = sys_ / "bus" / "pci" / "devices" / address
    (sys_ / "bus" / "pci" / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    home.mkdir(parents=True)
    (home / "device").write_text(device + "\n")
    (home / "driver").symlink_to(sys_ / "bus" / "pci" / "drivers" / driver)
    (sys_ / "bus" / "pci" / "drivers" / driver / address).symlink_to(home)
    freq = home / "tile0" / "gt0" / "freq0"
    freq.mkdir(parents=True)
    for key, value in {"min_freq": 1200, "max_freq": 2400, "rpn_freq": 400, "rp0_freq": 2400}.items():
        (freq / key).write_text(f"{value}\n")


@pytest.fixture
def host(tmp_path: Path) -> dict[str, str]:
    """An environment with a Docker that answers and no leftovers."""
    program(tmp_path / "bin", "docker", '#!/bin/sh\n[ "$1" = version ] && echo 29.0.0\nexit 0\n')
    program(tmp_path / "bin", "fuser", "#!/bin/sh\nexit 1\n")
    program(tmp_path / "bin", "dmesg", "#!/bin/sh\nexit 0\n")
    program(tmp_path / "bin", "df", "#!/bin/sh\necho Avail\necho 500\n")
    return {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def health(root: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run(HOST / "health.sh", "--dri", root / "dri", "--sys", root / "sys", cwd=root, env=env)


def test_a_sound_host_of_two_cards_is_fit(tmp_path: Path, host: dict[str, str]) -> None:
    card(tmp_path, "0000:03:00.0", "renderD129")
    card(tmp_path, "0000:83:00.0", "renderD128")
    done = health(tmp_path, host)
    assert done.returncode == 0, done.stdout
    assert "0000:03:00.0 renderD129 device 0xe211 driver xe gt0=1200-2400MHz" in done.stdout
    assert "0000:83:00.0 renderD128" in done.stdout


def test_the_wrong_driver_is_a_fault(tmp_path: Path, host: dict[str, str]) -> None:
    card(tmp_path, "0000:03:00.0", "renderD128", driver="i915")
    done = health(tmp_path, host)
    assert done.returncode == 3
    assert "needs the xe driver, not i915" in done.stdout


def test_a_host_without_cards_docker_or_space_is_not_fit(tmp_path: Path, host: dict[str, str]) -> None:
    (tmp_path / "bin" / "docker").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "df").write_text("#!/bin/sh\necho Avail\necho 5\n")
    done = health(tmp_path, host)
    assert done.returncode == 3
    for words in ("no render node", "no daemon answers", "under 20 GiB"):
        assert words in done.stdout


def test_what_an_earlier_run_left_on_the_cards_is_a_fault(tmp_path: Path, host: dict[str, str]) -> None:
    card(tmp_path, "0000:03:00.0", "renderD128")
    (tmp_path / "bin" / "fuser").write_text("#!/bin/sh\necho ' 4711 4712'\n")
    (tmp_path / "bin" / "docker").write_text(
        '#!/bin/sh\n[ "$1" = ps ] && echo abc\n[ "$1" = version ] && echo 29\nexit 0\n'
    )
    done = health(tmp_path, host)
    assert done.returncode == 3
    assert re.search(r"other processes hold a card: +4711 4712", done.stdout)
    assert "1 containers of an earlier run are still up" in done.stdout


def test_clocks_are_set_recorded_and_a_refusal_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card(tmp_path, "0000:03:00.0", "renderD128")
    freq = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:03:00.0" / "tile0" / "gt0" / "freq0"
    env = {"MOEGATE_CLOCKS_RECORD": str(tmp_path / "record")}

    def clocks(want: str) -> subprocess.CompletedProcess[str]:
        return run(HOST / "clocks.sh", want, "--sys", tmp_path / "sys", cwd=tmp_path, env=env)

    assert clocks("2000").returncode == 0
    assert (freq / "min_freq").read_text() == (freq / "max_freq").read_text() == "2000\n"
    assert "asked 2000-2000 MHz, has 2000-2000 MHz" in (tmp_path / "record").read_text()
    monkeypatch.setenv(keys.CLOCKS, str(tmp_path / "record"))
    assert keys.host_fingerprint.__wrapped__()["clocks"] == "2000-2000 MHz", "a cell's key knows the clock policy"
    assert clocks("free").returncode == 0
    assert (freq / "min_freq").read_text() == "400\n"
    shutil.rmtree(tmp_path / "sys" / "bus" / "pci" / "drivers" / "xe")
    done = clocks("2000")
    assert done.returncode == 1
    assert "no card with the xe driver" in done.stderr


def test_setting_a_host_up_says_what_it_would_do(tmp_path: Path) -> None:
    done = run(HOST / "setup-b60.sh", "--dry-run", "--user", "ci-user", "--clocks", "2200", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "CLOCKS=2200" in done.stdout
    assert run(HOST / "setup-b60.sh", "--dry-run", "--clocks", "fast", cwd=tmp_path).returncode == 2
    assert run(HOST / "setup-b60.sh", "--dry-run", "--user", "a b", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize(("sick", "code", "ran"), [(False, 0, True), (True, 3, False)])
def test_a_runner_takes_one_job_and_only_when_fit(tmp_path: Path, sick: bool, code: int, ran: bool) -> None:
    folder = tmp_path / "runner"
    program(folder, "run.sh", '#!/bin/sh\necho "$@" >ran\nmkdir -p _work/left\n')
    (folder / "jit.conf").write_text("one-time\n")
    program(tmp_path / "bin", "docker", "#!/bin/sh\nexit 0\n")
    check = program(tmp_path / "bin", "health", f"#!/bin/sh\nexit {3 if sick else 0}\n")
    env = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "MOEGATE_HEALTH": str(check)}
    assert run(HOST / "runner.sh", folder, cwd=tmp_path, env=env).returncode == code
    assert (folder / "ran").exists() is ran
    assert (folder / "jit.conf").exists() is not ran
    assert not (folder / "_work").exists()
    if ran:
        assert (folder / "ran").read_text() == "--jitconfig one-time\n"
        assert run(HOST / "runner.sh", folder, cwd=tmp_path, env=env).returncode == 2


# KubeRay


def test_the_ray_cluster_counts_its_cards_and_trusts_nobody() -> None:
    document: dict[str, Any] = yaml.safe_load((ROOT / "infra" / "kuberay" / "raycluster-b60.yaml").read_text())
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", "RayCluster")
    spec = document["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    pin = next(line for line in (ROOT / "constraints" / "cpu.txt").read_text().splitlines() if line.startswith("ray=="))
    assert spec["rayVersion"] == pin.removeprefix("ray==")
    (workers,) = spec["workerGroupSpecs"]
    for group in (spec["headGroupSpec"], workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"] == container["resources"]["requests"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    # gpu.intel.com/xe does not end in "gpu": without num-gpus neither KubeRay nor Ray would count the cards.
    assert workers["rayStartParams"]["num-gpus"] == limits["gpu.intel.com/xe"] == "4"
    assert json.loads(json.loads(workers["rayStartParams"]["resources"])) == {resource_name("b60"): 4}
