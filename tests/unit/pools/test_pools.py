"""Who has which slot, and which devices are out of use."""

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moegate.errors import PoolError
from moegate.locks import file_stem
from moegate.records import DeviceIdentity, PoolSpec
from orchestrator import doctor as examination
from orchestrator.cli import app
from orchestrator.pools import discovery, leases, withdrawn
from orchestrator.pools.leases import Pool, open_pool
from orchestrator.pools.slots import HostDevice, Slot


@pytest.fixture(autouse=True)
def own_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEGATE_LOCK_DIR", str(tmp_path / "locks"))


def gpu_pool(count: int, name: str = "b60") -> Pool:
    devices = [HostDevice(DeviceIdentity("xpu", "B60", f"0000:{n:02x}:00.0"), n) for n in range(count)]
    return Pool(PoolSpec(name, "xpu", slots=count), [Slot(name, n, d) for n, d in enumerate(devices)], None)


@pytest.mark.parametrize(
    ("ray", "said"),
    [
        ("local", "B60 (0000:00:00.0) is not granted yet by the Ray that this run started (`ray: none` in"),
        (
            "head:6379",
            "B60 (0000:00:00.0) is in use on the Ray cluster at head:6379, or not granted yet (who has it: ray",
        ),
    ],
)
def test_who_is_waited_for_under_ray_is_said_once_it_takes_long(monkeypatch, ray, said):
    class Refusing:
        def take(self, slot: Slot) -> bool:
            return False

        def give(self, slot: Slot) -> None:
            raise AssertionError("nothing was taken")

        def close(self) -> None:
            pass

    device = HostDevice(DeviceIdentity("xpu", "B60", "0000:00:00.0"), 0)
    pool = Pool(PoolSpec("b60", "xpu", slots=1, ray=ray), [Slot("b60", 0, device)], Refusing())
    now = [100.0]
    monkeypatch.setattr(leases, "monotonic", lambda: now[0])
    for seconds in (0.0, 1.0, leases.WORTH_SAYING_S / 2):
        now[0] += seconds
        assert pool.take() is None
        assert pool.holder is None
    now[0] += leases.WORTH_SAYING_S / 2
    assert pool.take() is None
    assert (pool.holder or "").startswith(said)
    assert "`ray: none` in the pool leaves Ray out" in (pool.holder or "")
    pool.close()


def test_two_leases_never_share_a_device_and_a_second_orchestrator_waits():
    mine, theirs = gpu_pool(2), gpu_pool(2)
    first, second = mine.take(), mine.take()
    assert first
    assert second
    assert first.slot.device != second.slot.device
    assert mine.take() is None
    assert theirs.take() is None
    assert "in use by another orchestrator" in (theirs.holder or "")
    first.release()
    first.release()
    lease = theirs.take()
    assert lease
    assert lease.slot.device.identity == first.slot.device.identity


def test_two_orchestrators_have_one_device_in_turn():
    mine, theirs = gpu_pool(1), gpu_pool(1)
    lease = mine.take()
    for taker, other in ((theirs, mine), (mine, theirs)) * 3:
        assert lease
        assert taker.take() is None, "it is held; now the taker is next"
        lease.release()
        assert other.take() is None, "whoever had it does not get it again before the one who waits"
        assert "next on B60" in (other.holder or "")
        other.settle()
        lease = taker.take()


def test_a_place_in_the_queue_that_nobody_wants_any_more_is_given_up():
    mine, theirs = gpu_pool(2), gpu_pool(2)
    first, second = mine.take(), mine.take()
    assert first
    assert second
    assert theirs.take() is None  # next on both
    theirs.settle()
    first.release()
    assert theirs.take()
    second.release()
    assert mine.take("0000:01:00.0") is None, "they are still next, as far as anybody knows"
    theirs.settle()  # a round in which they asked, and got the other
    theirs.settle()  # a round in which they did not ask
    assert mine.take("0000:01:00.0")


def test_the_queue_forgets_the_dead():
    mine, theirs = gpu_pool(1), gpu_pool(1)
    lease = mine.take()
    assert lease
    assert theirs.take() is None
    theirs.close()
    lease.release()
    assert mine.take()


def test_waiting_for_one_device_does_not_hide_another():
    mine, theirs = gpu_pool(2), gpu_pool(2)
    assert theirs.take("0000:00:00.0")
    assert mine.take("0000:00:00.0") is None
    assert not mine.busy()
    assert mine.take("0000:01:00.0")


def test_a_lease_can_ask_for_one_device():
    pool = gpu_pool(3)
    lease = pool.take("0000:02:00.0")
    assert lease
    assert lease.slot.index == 2
    assert pool.take("0000:02:00.0") is None
    assert pool.take("0000:07:00.0") is None


def test_a_withdrawn_device_does_not_come_back():
    pool = gpu_pool(1)
    lease = pool.take()
    assert lease
    assert pool.alive()
    pool.withdraw(lease.slot)
    lease.release()
    assert pool.take() is None
    assert not pool.alive()


def cuda_pool(slots):
    return open_pool(PoolSpec("h200", "cuda", slots=slots), lambda *_: None, ())


def test_a_device_that_fails_its_health_probe_is_out_of_use_until_it_is_released(simulated_host):
    simulated_host.nvidia(2)
    pool, neighbour = cuda_pool(2), cuda_pool(2)
    lease = pool.take("GPU-0001")
    assert lease
    simulated_host.nvidia(1)  # it fell off the bus
    said = pool.withdraw(lease.slot)
    lease.release()
    assert said is not None
    assert "GPU-0001 is withdrawn" in said
    assert "1 cuda devices answer, and it is not one of them" in said
    assert neighbour.take("GPU-0001") is None
    assert not neighbour.alive("GPU-0001")
    simulated_host.nvidia(2)  # it came back, and nobody has looked at it yet
    with pytest.raises(PoolError, match=r"wants 2 devices, this host has 1; GPU-0001 is withdrawn .*doctor --release"):
        cuda_pool(2)
    assert cuda_pool(1).take("GPU-0001") is None
    assert withdrawn.release("GPU-0001")
    assert not withdrawn.release("GPU-0001")
    assert cuda_pool(2).take("GPU-0001")


def test_a_lost_device_that_answers_again_is_left_out_of_this_run_only(simulated_host):
    simulated_host.nvidia(2)
    pool = cuda_pool(2)
    lease = pool.take("GPU-0001")
    assert lease
    assert pool.withdraw(lease.slot) is None
    assert not pool.alive("GPU-0001")
    assert withdrawn.marks() == {}


@pytest.mark.parametrize("text", ["", "[]", '{"identity": "GPU-9", "kind": "cuda", "reason": "r", "since": "s"}'])
def test_a_mark_that_is_not_ours_counts_by_its_name_and_is_released_by_it(tmp_path, monkeypatch, text):
    monkeypatch.setenv("MOEGATE_LOCK_DIR", str(tmp_path))
    (tmp_path / "withdrawn").mkdir()
    (tmp_path / "withdrawn" / "GPU-0001.json").write_text(text)
    assert list(withdrawn.marks()) == ["GPU-0001"]
    assert not withdrawn.release("GPU-9")
    assert withdrawn.release("GPU-0001")
    assert withdrawn.marks() == {}


def test_a_damaged_mark_holds_its_device_back(simulated_host):
    simulated_host.amd(2)
    first = discovery.devices("rocm", 2)[0]
    withdrawn.mark(first, "it hangs")
    file = withdrawn.lock_directory() / "withdrawn" / f"{file_stem(first.identity.identity)}.json"
    file.write_text("{")
    with pytest.raises(PoolError, match=r"wants 2 devices, this host has 1; .*cannot be read"):
        open_pool(PoolSpec("mi300x", "rocm", slots=2), lambda *_: None, ())
    assert withdrawn.release(first.identity.identity)
    assert len(open_pool(PoolSpec("mi300x", "rocm", slots=2), lambda *_: None, ()).slots) == 2


def test_doctor_names_and_releases_withdrawn_devices(simulated_host, monkeypatch):
    simulated_host.nvidia(1)
    # The other probes start programs of their own, and have tests of their own.
    monkeypatch.setattr(examination, "PROBES", tuple(p for p in examination.PROBES if p.name == "devices"))
    withdrawn.mark(discovery.devices("cuda", 1)[0], "Xid 79")

    def doctor(*argv):
        done = CliRunner().invoke(app, ["doctor", "--json", *argv])
        return done.exit_code, done.exception, done.stdout

    def finding(text):
        return next(f for f in json.loads(text)["findings"] if f["name"] == "devices")

    assert "GPU-0000 is withdrawn" in finding(doctor()[2])["detail"]
    code, error, _ = doctor("--release", "GPU-9")
    assert code != 0
    assert "withdrawn: GPU-0000" in error.fix
    code, _, text = doctor("--release", "GPU-0000")
    assert code == 0
    assert finding(text)["present"]


def test_doctor_passes_on_what_a_device_says_would_help(simulated_host, monkeypatch):
    simulated_host.nvidia(1)
    monkeypatch.setattr(examination, "PROBES", tuple(p for p in examination.PROBES if p.name == "nvidia"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (found,) = examination.examine()
    assert (found.present, found.fix) == (False, "unset CUDA_VISIBLE_DEVICES")


def test_overlapping_cpu_sets_collide():
    device = HostDevice(DeviceIdentity("cpu", "c", "cpu:host"))
    spec = PoolSpec("a", "cpu")
    whole, part = Pool(spec, [Slot("a", 0, device, (0, 1))], None), Pool(spec, [Slot("a", 0, device, (1,))], None)
    lease = whole.take()
    assert lease
    assert part.take() is None
    lease.release()
    assert part.take()
    assert whole.take() is None


def test_a_missing_ray_names_the_fix(monkeypatch):
    from orchestrator.pools import ray

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PoolError, match="write `ray: none` in the pool"):
        ray.start([PoolSpec("cpu", "cpu")], Path("/nowhere"))


def eventually(take) -> bool:
    """A placement group is removed, and a waiting one placed, a moment after the call."""
    return any(take() or time.sleep(0.1) for _ in range(200))


@pytest.mark.ray
@pytest.mark.slow
def test_a_real_ray_counts_slots_for_everybody(tmp_path, monkeypatch):
    if importlib.util.find_spec("ray") is None:  # importing it here would be too early: it reads its token once
        pytest.skip("ray is not installed")
    from orchestrator.pools import ray

    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    spec = PoolSpec("cpu", "cpu", slots=2)
    folder = Path(tempfile.mkdtemp(prefix="moegate-ray-"))
    ray.start([spec], folder)
    try:
        assert os.environ["RAY_AUTH_MODE"] == "token"
        mine, theirs, third = (ray.RayAllocator(spec) for _ in range(3))
        assert eventually(lambda: mine.take(0))
        assert eventually(lambda: theirs.take(1))
        assert not third.take(1)
        theirs.give(1)
        assert eventually(lambda: third.take(1))
        mine.close()
        assert eventually(lambda: theirs.take(0))
        with pytest.raises(PoolError, match="offers 2"):
            ray.check_offer([PoolSpec("cpu", "cpu", slots=3)], "local")
    finally:
        ray.stop()
        os.environ.pop("RAY_AUTH_TOKEN", None)
        shutil.rmtree(folder)
