"""Several devices at once, and arms whose configs or code come from a commit."""

# ruff: noqa: E501 - edits read best on one line
import importlib.util
import subprocess
import time
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from moegate import journal
from moegate.errors import UsageError
from moegate.locks import device_lock
from moegate.records import Comparison, read
from orchestrator.bundle import read_run
from orchestrator.commands._conclude import conclude
from orchestrator.scheduler import RunDir

ADDRESSES = [f"0000:0{number + 1}:00.0" for number in range(4)]


@pytest.fixture
def four_cards(simulated_host):
    simulated_host.intel(dict(zip(ADDRESSES, (2, 0, 3, 1), strict=True)))


POOL = ("  cpu: {device: cpu, ray: none, isolation: process}",
        "  cpu: {device: xpu, slots: 4, ray: none, isolation: process, device_name: Intel(R) Arc(TM) Pro B60 Graphics}")  # fmt: skip


def attempts(path):
    """(device, first entry, last entry) of each attempt."""
    begun, spans = {}, []
    for entry in journal.read(path / "journal"):
        key = (entry.data.get("cell"), entry.data.get("attempt"))
        if entry.kind == "lease":
            begun[key] = (entry.data["device"], entry.seq)
        elif entry.kind == "done":
            spans.append((*begun.pop(key), entry.seq))
    assert not begun
    return spans


def test_many_cells_spread_over_four_cards_and_never_two_on_one(run, four_cards):
    ops = ", ".join(f"op{number}" for number in range(32))
    run.edit(POOL, ("    dtypes: [float32]", f"    ops: [{ops}]\n    dtypes: [float32]"))
    run("kernel-test/*")
    spans = attempts(run.path)
    by_device = defaultdict(list)
    for device, first, last in spans:
        by_device[device].append((first, last))
    assert len(spans) == 32
    assert set(by_device) == set(ADDRESSES)
    for intervals in by_device.values():
        ordered = sorted(intervals)
        assert all(before[1] < after[0] for before, after in pairwise(ordered))
        assert len(intervals) > 1, "no card was left idle"
    assert all(outcome.state == "PASSED" for outcome in read_run(run.path).outcomes)


FLEET = """\
  b60: {device: xpu, slots: 4, isolation: process, device_name: Intel(R) Arc(TM) Pro B60 Graphics}
  h200: {device: cuda, slots: 8, isolation: process, device_name: NVIDIA H200}
  mi300x: {device: rocm, slots: 8, isolation: process, device_name: AMD Instinct MI300X}
"""


@pytest.mark.ray
@pytest.mark.slow
def test_three_pools_of_a_real_ray_spread_100_cells(run, simulated_host, four_cards):
    """Four B60s, eight H200s and eight MI300X at once: cells flow to where they fit, no two on one device."""
    if importlib.util.find_spec("ray") is None:  # importing it here would fix its token for the whole process
        pytest.skip("ray is not installed: pip install -e '.[ray]'")
    simulated_host.nvidia(8)
    simulated_host.amd(8)
    ops = ", ".join(f"op{number}" for number in range(34))
    run.edit(("  cpu: {device: cpu, ray: none, isolation: process}\n", FLEET), ("  - kind: check\n", ""),
             ("pools: [cpu]", "pools: [b60, h200, mi300x]"), ("    dtypes: [float32]", f"    ops: [{ops}]\n    dtypes: [float32]"))  # fmt: skip
    process = run.start("--only=kernel-test/*")
    text, _ = process.communicate(timeout=280)
    assert process.returncode == 0, text
    assert Counter(outcome.state for outcome in read_run(run.path).outcomes) == {"PASSED": 102}
    by_device = defaultdict(list)
    for device, first, last in attempts(run.path):
        by_device[device].append((first, last))
    amd = {f"0000:{number + 5:02x}:00.0" for number in range(8)}
    assert set(by_device) == {*ADDRESSES, *(f"GPU-{number:04x}" for number in range(8)), *amd}
    for intervals in by_device.values():
        assert all(before[1] < after[0] for before, after in pairwise(sorted(intervals)))
        assert len(intervals) > 1, "no device was left idle"


def test_both_stages_of_a_cell_run_on_one_card(run, four_cards):
    run.edit(POOL)
    run()
    facts = read_run(run.path)
    assert {outcome.state for outcome in facts.outcomes} == {"PASSED"}
    for cell in facts.plan.cells:
        devices = {launch.device.identity for m in facts.measurements[cell.id] for launch in m.launches}
        assert len(devices) == (1 if cell.arms else 0)
    # On this platform auto is served by another backend than Triton, so its cell is a control.
    assert [c.control for c in facts.plan.cells if c.kind == "serve"] == [True, False]
    assert conclude(run.path).exit == 0


def test_a_cells_on_every_card_at_once_are_judged_and_counted(run, four_cards):
    """The baseline against itself with all slots busy: what the report calls its false-alarm rate."""
    run.edit(POOL, ("    batch_sizes: [2]\n", "    batch_sizes: [2]\n    aa: true\n    dtypes: [float32, bfloat16, float16, fp8_w8a8]\n    graph: [eager, full]\n"),
             ("kind: check\n  - kind: kernel-test\n    dtypes: [float32]", "kind: check"))  # fmt: skip
    run("kernel-bench/*")
    spans = attempts(run.path)
    at_once = max(sum(first <= at <= last for _, first, last in spans) for _, at, _ in spans)
    assert at_once == 4
    conclude(run.path)
    comparison = read(Comparison, run.path / "comparison.json")
    assert (comparison.aa_cells, comparison.aa_flagged) == (8, 0)
    assert {cell.family for cell in comparison.cells} == {"control"}
    assert "0 of 8 A/A cells flagged in this run" in (run.path / "report.html").read_text()


def test_a_launch_on_another_card_is_no_result(run, four_cards):
    run.edit(POOL, ("untuned: {configs: none}", "untuned: {configs: none, env: {FAKE: wrong-card}}"))
    run("kernel-bench/*")
    outcome = read_run(run.path).outcomes[-1]
    assert outcome.state == "INFRA_ERROR"
    assert "asked for device 0000:01:00.0, the launch ran on 0000:02:00.0" in outcome.reason
    assert len(outcome.attempts) == 1


def test_two_orchestrators_have_the_only_card_in_turn(run, simulated_host):
    """Each launch stands still until the other orchestrator waits for the card, however long that takes it."""
    simulated_host.intel({ADDRESSES[0]: 0})
    ops = ", ".join(f"op{number}" for number in range(6))
    room = device_lock(f"{ADDRESSES[0]}.next").path
    run.edit(POOL, ("slots: 4", "slots: 1"), ("    dtypes: [float32]", f"    ops: [{ops}]\n    dtypes: [float32]"),
             ("timeout: 20s", "timeout: 100s"),
             ("pools:\n", f"images:\n  i: {{reference: 'x@sha256:{'0' * 64}', env: {{FAKE_AWAIT: '{room}'}}}}\npools:\n"),
             ("isolation: process, device_name", "image: i, isolation: process, device_name"))  # fmt: skip
    folders = [run.path, run.repository / "second"]
    processes = []
    for run.path in folders:
        processes.append(run.start("--only=kernel-test/*"))
    while all(process.poll() is None for process in processes):
        time.sleep(0.01)
    room.with_name("over").touch()  # from now on the other one has the card alone
    for process in processes:
        text, _ = process.communicate(timeout=120)
        assert process.returncode == 0, text
    leases = sorted(
        (entry.time, entry.kind == "lease", folder.name)
        for folder in folders
        for entry in journal.read(folder / "journal")
        if entry.kind in ("lease", "done")
    )
    order = [name for _, is_lease, name in leases if is_lease]
    assert len(order) == 12
    assert all(one != two for one, two in pairwise(order)), order
    kinds = [is_lease for _, is_lease, _ in leases]
    assert kinds == [True, False] * 12, "never two on the card"


def test_two_orchestrators_share_the_cards_of_a_host(run, four_cards, tmp_path):
    ops = ", ".join(f"op{number}" for number in range(12))
    run.edit(POOL, ("    dtypes: [float32]", f"    ops: [{ops}]\n    dtypes: [float32]"),
             ("  - kind: check\n", ""), ("pools:\n", "images:\n  i: {reference: 'x@sha256:" + "0" * 64 + "', env: {FAKE_SLEEP: '0.05'}}\npools:\n"),
             ("isolation: process, device_name", "image: i, isolation: process, device_name"))  # fmt: skip
    first = run.start()
    there, run.path = run.path, run.repository / "second"
    second = run.start()
    for process in (first, second):
        text, _ = process.communicate(timeout=120)
        assert process.returncode == 0, text
    for path in (there, run.path):
        assert [outcome for outcome in read_run(path).outcomes if outcome.state != "PASSED"] == []


@pytest.fixture
def commit(run):
    """Commit a config tree, then change it, so that the commit and the folder differ."""
    folder = run.repository / "kernels" / "configs" / "triton_3_8_0"
    folder.mkdir(parents=True)
    (folder / "E=8,N=64,device_name=cpu,dtype=float32.json").write_text("{}")
    project = run.repository / "pyproject.toml"
    project.write_text('[project]\nname = "moegate"\nversion = "0.1.0"\n[tool.setuptools]\npackages = ["moegate"]\n')
    (run.repository / "moegate").mkdir()
    (run.repository / "moegate" / "__init__.py").write_text("MARK = 'first'\n")
    git = ["git", "-C", str(run.repository), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for argv in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *argv], check=True, capture_output=True)
    sha = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (folder / "E=8,N=64,device_name=cpu,dtype=float32.json").write_text('{"2": {}}')
    (run.repository / "moegate" / "__init__.py").write_text("MARK = 'edited'\n")
    return sha


def test_configs_of_a_commit_are_those_that_were_committed(run, commit):
    run.edit(("tuned: {configs: tuned}", "tuned: {configs: 'git:HEAD'}"))
    run("serve/*/triton/*")
    facts = read_run(run.path)
    assert next(arm for arm in facts.plan.arms if arm.name == "tuned").configs == f"git:{commit}"
    assert facts.outcomes[-1].state == "PASSED", facts.outcomes[-1]
    tree = next((run.path / "sources").rglob("E=8*.json"))
    assert tree.read_text() == "{}"


def test_an_arm_with_a_source_runs_that_commits_code_and_the_other_this_one(run, commit, tmp_path):
    run.programs = {name: tuple(part for part in argv if part != "-S") for name, argv in run.programs.items()}
    run.edit(("tuned: {configs: tuned}", "tuned: {configs: none, source: HEAD}"))
    run("serve/*/triton/*")
    facts = read_run(run.path)
    assert facts.outcomes[-1].state == "PASSED", facts.outcomes[-1]
    seen = {launch.arm: launch.detail for launch in facts.measurements[facts.outcomes[-1].cell][0].launches}
    assert seen["tuned"]["source"] == commit
    assert "source" not in seen["untuned"]
    assert seen["tuned"]["imported"] == ["first", f"0.1.0+g{commit[:12]}"]
    assert seen["untuned"]["imported"][0] != "first"
    (environment,) = (tmp_path / "cache" / "moegate" / "sources").glob(f"{commit}-*/")
    assert (environment / "bin" / "python").exists()
    # A second run finds it made.
    before = environment.stat().st_ino
    run.path = run.repository / "again"
    run("serve/*/triton/*")
    assert read_run(run.path).outcomes[-1].state == "PASSED"
    assert environment.stat().st_ino == before


def test_a_commit_that_cannot_be_installed_is_refused_before_anything_runs(run, commit):
    git = ["git", "-C", str(run.repository), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    (run.repository / "pyproject.toml").write_text('[project]\nname = "another"\n')
    subprocess.run([*git, "commit", "-qam", "another"], check=True)
    run.edit(("tuned: {configs: tuned}", "tuned: {configs: none, source: HEAD}"))
    with pytest.raises(UsageError, match="is of 'another'") as refused:
        run.plan()
    assert refused.value.line == 9


def test_kernels_that_are_not_the_commits_are_no_result(run, commit):
    run.edit(("tuned: {configs: tuned}", "tuned: {configs: none, source: HEAD, env: {FAKE: other-kernels}}"))
    run("serve/*/triton/*")
    outcome = read_run(run.path).outcomes[-1]
    assert outcome.state == "INFRA_ERROR"
    assert f"asked for the code of {commit[:12]}, the launch ran kernels ffffffffffff" in outcome.reason


def test_a_tuner_that_was_killed_goes_on_from_its_own_journal(run):
    run.edit(("  cpu: {device: cpu, ray: none, isolation: process}", "  cpu: {device: cpu, ray: none, isolation: process, image: i}"),
             ("pools:\n", "images:\n  i: {reference: 'x@sha256:" + "0" * 64 + "', env: {FAKE_TUNE_SLEEP: '60'}}\npools:\n"))  # fmt: skip
    process = run.start()
    tune = next(cell for cell in run.plan().cells if cell.kind == "tune")
    file = RunDir(run.path).attempt(tune.id, 1) / "launch-000" / "tuned" / "journal"
    while not file.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    run.start(resume=True).communicate(timeout=120)
    facts = read_run(run.path)
    assert facts.measurements[tune.id][0].detail["adopted"] is True
    outcome = next(outcome for outcome in facts.outcomes if outcome.cell == tune.id)
    assert [attempt.state for attempt in outcome.attempts] == ["CANCELLED", "PASSED"]
