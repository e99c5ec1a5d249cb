"""What a host has, and how launches see it."""

import os
from pathlib import Path

import pytest

from moegate.errors import PoolError
from moegate.records import DeviceIdentity, PoolSpec
from orchestrator.pools import discovery
from orchestrator.pools.isolation.flags import device_options
from orchestrator.pools.isolation.process import visible_device
from orchestrator.pools.leases import open_pool
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


@pytest.mark.parametrize(
    ("mask", "seen"),
    [("1", ["GPU-bb"]), ("GPU-a", ["GPU-aa"]), ("1, 0", ["GPU-aa", "GPU-bb"]), ("0,0", ["GPU-aa"]),
     ("1,-1,0", ["GPU-bb"])],
)  # fmt: skip
def test_devices_that_are_masked_from_the_orchestrator_are_not_its_own(tool, monkeypatch, mask, seen):
    tool("nvidia-smi", "print('0, GPU-aa, NVIDIA H200, 580.1, 9.0, 1\\n1, GPU-bb, NVIDIA H200, 580.1, 9.0, 1')")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert [device.identity.identity for device in discovery.devices("cuda", 1)] == seen


@pytest.mark.parametrize(
    ("mask", "said"),
    [("", "hides all of them"), ("2", "names '2', which nvidia-smi does not list"),
     ("MIG-1", "MIG slices are no devices of a pool"), ("-1", "hides all of them"),
     ("GPU-", "names 'GPU-'"), ("0", "counts the fastest first, nvidia-smi by address, and this host has A, B")],
)  # fmt: skip
def test_a_mask_that_cannot_be_honoured_is_said(tool, monkeypatch, mask, said):
    tool("nvidia-smi", "print('0, GPU-aa, A, 580.1, 9.0, 1\\n1, GPU-bb, B, 580.1, 9.0, 1')")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    with pytest.raises(PoolError, match=said):
        discovery.devices("cuda", 1)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert len(discovery.devices("cuda", 1)) == 1


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
    with pytest.raises(PoolError, match=r"pip install -e '\.\[xpu\]'"):
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


def test_a_device_of_another_name_or_too_few_devices_is_refused(tool, monkeypatch):
    tool("nvidia-smi", "print('0, GPU-a, NVIDIA H100 80GB HBM3, 580.1, 9.0, 81559')")
    with pytest.raises(PoolError, match="wants NVIDIA H200, this host has NVIDIA H100"):
        open_pool(PoolSpec("h", "cuda", device_name="NVIDIA H200"), lambda *_: None, ())
    with pytest.raises(PoolError, match=r"wants 2 devices, this host has 1$"):
        open_pool(PoolSpec("h", "cuda", slots=2), lambda *_: None, ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(PoolError, match=r"this host has 1; CUDA_VISIBLE_DEVICES=0 may hide others$"):
        open_pool(PoolSpec("h", "cuda", slots=2), lambda *_: None, ())


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
