"""What a host has, how launches see it, and who has which slot."""

import importlib.util
import json
import os
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
from orchestrator.pools import discovery, withdrawn
from orchestrator.pools.isolation.flags import device_options
from orchestrator.pools.isolation.process import visible_device
from orchestrator.pools.leases import Pool, open_pool
from orchestrator.pools.slots import HostDevice, Slot
from tests.standin.programs import write_program


@pytest.fixture(autouse=True)
def own_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEGATE_LOCK_DIR", str(tmp_path / "locks"))


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Put a stand-in for a vendor's tool on the path."""

    def write(name: str, body: str) -> None:
        folder = write_program(tmp_path / "bin" / name, body).parent
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return write


def gpu_pool(count: int, name: str = "b60") -> Pool:
    devices = [HostDevice(DeviceIdentity("xpu", "B60", f"0000:{n:02x}:00.0"), n) for n in range(count)]
    return Pool(PoolSpec(name, "xpu", slots=count), [Slot(name, n, d) for n, d in enumerate(devices)], None)


@pytest.mark.parametrize(
    ("ray", "said"),
    [
        ("local", "B60 (0000:00:00.0) is not granted yet by the Ray that this run started"),
        ("head:6379", "B60 (0000:00:00.0) is in use on the Ray cluster at head:6379, or not granted yet"),
    ],
)
def test_who_is_waited_for_under_ray_is_said(ray, said):
    class Refusing:
        def take(self, slot: Slot) -> bool:
            return False

        def give(self, slot: Slot) -> None:
            raise AssertionError("nothing was taken")

        def close(self) -> None:
            pass

    device = HostDevice(DeviceIdentity("xpu", "B60", "0000:00:00.0"), 0)
    pool = Pool(PoolSpec("b60", "xpu", slots=1, ray=ray), [Slot("b60", 0, device)], Refusing())
    assert pool.take() is None
    assert pool.holder == said
    pool.close()


def test_cpu_sets_are_disjoint_and_cover_what_is_usable():
    usable = sorted(os.sched_getaffinity(0))
    for slots in range(1, len(usable) + 1):
        sets = discovery.cpu_sets(slots)
        assert sorted(cpu for part in sets for cpu in part) == usable
        assert max(map(len, sets)) - min(map(len, sets)) <= 1
    with pytest.raises(PoolError, match=f"write slots: {len(usable)}"):
        discovery.cpu_sets(len(usable) + 1)


def test_nvidia_devices_are_named_by_uuid(tool):
    tool("nvidia-smi", "print('1, GPU-b, NVIDIA H200, 580.1, 9.0, 143771\\n0, GPU-a, NVIDIA H200, 580.1, 9.0, 143771')")
    found = discovery.devices("cuda", 2)
    assert [(d.identity.identity, d.ordinal, d.identity.arch) for d in found] == [
        ("GPU-b", 1, "sm_90"),
        ("GPU-a", 0, "sm_90"),
    ]
    assert found[0].identity.memory_bytes == 143771 << 20


def test_a_tool_that_fails_hangs_or_is_missing_is_said(tool, monkeypatch):
    tool("nvidia-smi", "import sys; sys.exit('Failed to initialize NVML: Unknown Error')")
    with pytest.raises(PoolError, match="Failed to initialize NVML"):
        discovery.devices("cuda", 1)
    tool("rocm-smi", "import time; time.sleep(60)")
    monkeypatch.setattr(discovery, "_DEADLINE_S", 0.5)
    with pytest.raises(PoolError, match="did not answer"):
        discovery.devices("rocm", 1)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PoolError, match="not installed"):
        discovery.devices("cuda", 1)


def test_an_intel_host_without_dpctl_is_an_error_with_the_command_that_mends_it():
    with pytest.raises(PoolError, match=r"pip install 'moegate\[xpu\]'"):
        discovery.devices("xpu", 1)


B60 = "Intel(R) Arc(TM) Pro B60 Graphics"


def test_intel_cards_are_known_by_address_and_their_nodes_are_looked_up_each_time(simulated_host):
    simulated_host.intel({"0000:83:00.0": 0, "0000:03:00.0": 1, "0001:03:00.0": 2})
    found = discovery.devices("xpu", 3)
    # The driver's order is the addresses' order, so that a mask's number is the place in it.
    assert [(d.identity.identity, d.ordinal) for d in found] == [
        ("0000:03:00.0", 0), ("0000:83:00.0", 1), ("0001:03:00.0", 2),
    ]  # fmt: skip
    assert [[Path(node).name for node in d.nodes] for d in found] == [
        ["renderD129", "card1"], ["renderD128", "card0"], ["renderD130", "card2"],
    ]  # fmt: skip
    assert {d.identity.name for d in found} == {B60}
    assert found[0].identity.memory_bytes == 25669140480


@pytest.mark.parametrize("links", [True, False])
def test_renumbered_nodes_still_give_the_same_card(simulated_host, links):
    simulated_host.dpctl([B60, B60])
    for order in ((0, 1), (1, 0), (5, 2)):  # what a reboot, a new driver or an added card does to the numbers
        for address, number in zip(("0000:03:00.0", "0000:83:00.0"), order, strict=True):
            simulated_host.card(address, number, links=links)
        pool = open_pool(PoolSpec("b60", "xpu", slots=2, device_name=B60), lambda *_: None, ())
        lease = pool.take("0000:83:00.0")
        assert lease
        device = lease.slot.device
        lease.release()
        assert [Path(node).name for node in device.nodes] == [f"renderD{128 + order[1]}", f"card{order[1]}"]
        options = device_options(device, group_of=lambda path: 992)
        assert options["devices"] == [f"{node}:{node}:rw" for node in device.nodes]
        assert visible_device(lease.slot)["ZE_AFFINITY_MASK"] == "1"


def test_an_integrated_card_comes_last_or_is_not_counted(simulated_host):
    simulated_host.card("0000:00:02.0", 0)
    simulated_host.intel({"0000:03:00.0": 1})
    (only,) = discovery.devices("xpu", 1)  # the driver leaves the integrated one out
    assert only.identity.identity == "0000:03:00.0"
    simulated_host.dpctl([B60, "Intel(R) Graphics"])
    found = {d.identity.identity: (d.ordinal, d.identity.name) for d in discovery.devices("xpu", 2)}
    assert found == {"0000:03:00.0": (0, B60), "0000:00:02.0": (1, "Intel(R) Graphics")}


def test_the_cards_are_counted_in_the_order_that_launches_see(simulated_host, monkeypatch):
    simulated_host.intel({"0000:03:00.0": 0})
    (simulated_host.root / "python" / "dpctl.py").write_text(
        "import os\n"
        "def get_devices(backend, device_type):\n"
        "    other = 'ZE_ENABLE_PCI_ID_DEVICE_ORDER' in os.environ\n"
        "    raise SystemExit('another order' if other else 'the usual order')\n"
    )
    monkeypatch.setenv("ZE_ENABLE_PCI_ID_DEVICE_ORDER", "1")
    with pytest.raises(PoolError, match="the usual order"):
        discovery.devices("xpu", 1)


def test_a_card_that_the_driver_does_not_count_is_said(simulated_host):
    simulated_host.intel({"0000:03:00.0": 0, "0000:83:00.0": 1})
    simulated_host.dpctl([B60])
    with pytest.raises(PoolError, match="counts 1 Intel devices, /dev/dri holds 2 cards"):
        discovery.devices("xpu", 1)


def test_a_mask_on_the_orchestrator_itself_is_refused(simulated_host, monkeypatch):
    simulated_host.intel({"0000:03:00.0": 0})
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0")
    with pytest.raises(PoolError, match="unset ZE_AFFINITY_MASK"):
        discovery.devices("xpu", 1)


def test_amd_devices_are_known_by_address_in_numeric_order(simulated_host):
    simulated_host.amd(12)
    found = discovery.devices("rocm", 12)
    assert [d.identity.identity for d in found] == [f"0000:{n + 5:02x}:00.0" for n in range(12)]
    assert [Path(node).name for node in found[10].nodes] == ["kfd", "renderD138", "card10"]
    simulated_host.tool("rocm-smi", """print('{"card0": {"PCI Bus": "N/A"}}')""")
    with pytest.raises(PoolError, match="PCI bus 'n/a'"):
        discovery.devices("rocm", 1)


def test_a_device_of_another_name_or_too_few_devices_is_refused(tool):
    tool("nvidia-smi", "print('0, GPU-a, NVIDIA H100 80GB HBM3, 580.1, 9.0, 81559')")
    with pytest.raises(PoolError, match="wants NVIDIA H200, this host has NVIDIA H100"):
        open_pool(PoolSpec("h", "cuda", device_name="NVIDIA H200"), lambda *_: None, ())
    with pytest.raises(PoolError, match="wants 2 devices, this host has 1"):
        open_pool(PoolSpec("h", "cuda", slots=2), lambda *_: None, ())


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


MASKS = {
    "cpu": {},
    "cuda": {"CUDA_VISIBLE_DEVICES": "ID", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    "rocm": {"HIP_VISIBLE_DEVICES": "3"},
    "xpu": {"ZE_AFFINITY_MASK": "3", "ZE_FLAT_DEVICE_HIERARCHY": "FLAT"},
}


@pytest.mark.parametrize("kind", sorted(MASKS))
def test_a_child_sees_one_device_through_one_mask(kind):
    slot = Slot("p", 0, HostDevice(DeviceIdentity(kind, "n", "ID"), 3))
    assert visible_device(slot) == MASKS[kind]


def test_a_missing_ray_names_the_fix(monkeypatch):
    from orchestrator.pools import ray

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PoolError, match="write `ray: none` in the pool"):
        ray.start([PoolSpec("cpu", "cpu")])


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
    device = HostDevice(DeviceIdentity("cpu", "c", "cpu:host"))
    slots = [Slot("cpu", n, device, (n,)) for n in range(2)]
    before = set(Path(tempfile.gettempdir()).glob("moegate-ray-*"))
    ray.start([spec])
    try:
        assert os.environ["RAY_AUTH_MODE"] == "token"
        mine, theirs, third = (ray.RayAllocator(spec) for _ in range(3))
        assert eventually(lambda: mine.take(slots[0]))
        assert eventually(lambda: theirs.take(slots[1]))
        assert not third.take(slots[1])
        theirs.give(slots[1])
        assert eventually(lambda: third.take(slots[1]))
        mine.close()
        assert eventually(lambda: theirs.take(slots[0]))
        with pytest.raises(PoolError, match="offers 2"):
            ray.check_offer([PoolSpec("cpu", "cpu", slots=3)], "local")
    finally:
        ray.stop()
        os.environ.pop("RAY_AUTH_TOKEN", None)
    assert set(Path(tempfile.gettempdir()).glob("moegate-ray-*")) <= before
