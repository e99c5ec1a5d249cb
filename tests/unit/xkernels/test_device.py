"""The live-device module: the CPU for real, the accelerators over a simulated torch module."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tuner.compile.targets import SimulatedDevice, find
from xkernels import device as devices
from xkernels.device import CpuDevice, CudaDevice, Device, RocmDevice, XpuDevice, cuda


class Simulated:
    """A torch.cuda or torch.xpu of one device that keeps a record of what it was asked to do."""

    def __init__(self, **properties: Any) -> None:
        self.properties = SimpleNamespace(total_memory=64 << 30, uuid="1234", **properties)
        self.log: list[str] = []
        self.clock = 0.0

        module = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at = 0.0

            def record(self) -> None:
                module.clock += 2.0
                self.at = module.clock

            def synchronize(self) -> None:
                module.log.append("wait")

            def elapsed_time(self, other: Any) -> float:
                return other.at - self.at

        class Stream:
            def __init__(self, index: int = 0) -> None:
                self.index = index
                self.cuda_stream = self.sycl_queue = 41 + index

            def wait_stream(self, other: Any) -> None:
                module.log.append("join")

        class Graph:
            def replay(self) -> None:
                module.log.append("replay")

        self.Event, self.Stream, self.CUDAGraph, self.XPUGraph = Event, Stream, Graph, Graph
        self.side = Stream()

    def get_device_properties(self, index: int) -> Any:
        return self.properties

    def current_stream(self, index: int) -> Any:
        return self.side

    @contextmanager
    def stream(self, side: Any) -> Any:
        self.log.append("side")
        yield

    @contextmanager
    def graph(self, graph: Any) -> Any:
        self.log.append("capture")
        yield

    @contextmanager
    def device(self, index: int) -> Any:
        self.log.append(f"device {index}")
        yield

    def synchronize(self, index: int) -> None:
        self.log.append("synchronize")

    def manual_seed_all(self, value: int) -> None:
        self.log.append(f"seed {value}")

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 10, 20

    def max_memory_allocated(self, index: int) -> int:
        return 7

    def reset_peak_memory_stats(self, index: int) -> None:
        self.log.append("reset")

    def empty_cache(self) -> None:
        self.log.append("empty")


CUDA = {"name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132, "L2_cache_size": 60 << 20,
        "shared_memory_per_block_optin": 232448}  # fmt: skip
ROCM = {"name": "AMD Instinct MI300X", "gcnArchName": "gfx942:sramecc+:xnack-", "multi_processor_count": 304,
        "L2_cache_size": 4 << 20, "pci_domain_id": 0, "pci_bus_id": 3, "pci_device_id": 0}  # fmt: skip
XPU = {"name": "Intel(R) Arc(TM) Pro B60 Graphics", "gpu_subslice_count": 20, "driver_version": "1.6",
       "last_level_cache_size": 18 << 20, "local_mem_size": 131072}  # fmt: skip
LEAVES = [
    (CudaDevice, CUDA, "cuda", "sm_90", "cuda-sm90", 232448, {"pdl", "wgmma"}),
    (CudaDevice, {**CUDA, "major": 10}, "cuda", "sm_100", "cuda-sm100", 232448, {"pdl"}),
    (RocmDevice, ROCM, "rocm", "gfx942", "rocm-gfx942", 65536, set()),
    (XpuDevice, XPU, "xpu", "bmg", "xpu-bmg", 131072, set()),
]


@pytest.mark.parametrize(("version", "offered"), [("3.6.0", True), ("3.8.0+gitabc", True), ("3.9.0", False)])
def test_hoppers_products_are_offered_where_triton_compiles_our_kernels_with_them(
    version: str, offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", version)
    cuda._gluon_of_ours.cache_clear()
    try:
        device, target = CudaDevice(0, Simulated(**CUDA)), SimulatedDevice(find("sm_90"))
        assert device.features() == target.features() == ({"pdl", "wgmma"} if offered else {"pdl"})
    finally:
        cuda._gluon_of_ours.cache_clear()


@pytest.mark.parametrize(("leaf", "properties", "kind", "arch", "platform", "shared", "features"), LEAVES)
def test_simulated_accelerator(leaf: Any, properties: Any, kind: str, arch: str, platform: str, shared: int,
                               features: set[str]) -> None:  # fmt: skip
    module = Simulated(**properties)
    device = leaf(0, module)
    assert isinstance(device, Device)
    assert (device.kind, device.arch(), device.platform()) == (kind, arch, platform)
    identity = device.identity()
    assert (identity.kind, identity.name, identity.arch) == (kind, properties["name"], arch)
    assert identity.identity == {"cuda": "GPU-1234", "rocm": "0000:03:00.0", "xpu": "GPU-1234"}[kind]
    limits = device.limits()
    assert limits.shared_bytes == shared
    assert limits.resident_blocks >= limits.units > 0
    assert device.features() == features
    assert device.queue() == 41
    assert device.capturing() is False  # as a torch build that cannot tell
    module.is_current_stream_capturing = lambda: True
    assert device.capturing() is True
    assert device.memory_info() == (10, 20)
    assert device.peak_memory() == 7
    device.seed(3)
    assert module.log[-1] == "seed 3"
    first, second = device.event(), device.event()
    first.record()
    second.record()
    assert first.elapsed_ms(second) == 2.0
    with pytest.raises(TypeError, match="same device"):
        first.elapsed_ms(CpuDevice().event())
    calls: list[int] = []
    graph = device.capture(lambda: calls.append(1), warmups=2)
    assert len(calls) == 3
    assert graph is not None
    graph.replay()
    assert module.log[-2:] == ["capture", "replay"]
    assert module.log.count("join") == 2


def test_an_intel_card_is_named_by_the_address_in_its_uuid() -> None:
    module = Simulated(**XPU)
    module.properties.uuid = "868011e2-0000-0000-8300-000000000000"
    assert XpuDevice(0, module).identity().identity == "0000:83:00.0"


def test_no_graphs_where_torch_has_none() -> None:
    module = Simulated(**ROCM)
    del module.CUDAGraph
    module.CUDAGraph = None
    assert RocmDevice(0, module).capture(lambda: None) is None


def test_peak_memory_is_not_that_of_the_parent() -> None:
    if not Path("/proc/self/status").is_file():
        pytest.skip("the system tells no peak since exec")
    child = "from xkernels.device import CpuDevice; print(CpuDevice().peak_memory())"
    parent = (
        f"import subprocess, sys; big = b'x' * (1 << 30); subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    said = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True).stdout
    assert int(said) < 1 << 30


def test_cpu() -> None:
    device = devices.live()
    if device.kind != "cpu":
        pytest.skip("this process has an accelerator")
    assert isinstance(device, Device)
    assert device.torch_device() == torch.device("cpu")
    assert device.identity().identity.startswith("cpu:")
    assert device.platform() == device.arch() == "cpu"
    assert device.capture(lambda: None) is None
    free, total = device.memory_info()
    assert 0 < free <= total
    assert device.peak_memory() > 1 << 20
    first, second = device.event(), device.event()
    first.record()
    second.record()
    assert 0 <= first.elapsed_ms(second) < 1000
    device.seed(5)
    before = torch.rand(2)
    device.seed(5)
    assert torch.equal(before, torch.rand(2))
    with device.current(), device.stream():
        device.synchronize()


@pytest.mark.parametrize(
    ("leaf", "transport"), [(CpuDevice, "gloo"), (CudaDevice, "nccl"), (RocmDevice, "nccl"), (XpuDevice, "xccl")]
)
def test_every_device_names_what_moves_tensors_between_processes(leaf: type, transport: str) -> None:
    assert leaf.transport == transport


@pytest.mark.gpu
def test_small_captures_do_not_depend_on_each_other() -> None:
    device = devices.live()
    if device.kind == "cpu":
        pytest.skip("needs a GPU: there are no graphs on a CPU")
    data = torch.zeros(4, device=device.torch_device())
    for _ in range(3):  # each capture begins after the last graph of the pool is gone
        graph = device.capture(lambda: data.add_(1).mul(2), small=True)
        if graph is None:
            pytest.skip("this torch build has no graphs for this device")
        graph.replay()
        del graph
        gc.collect()
    device.synchronize()
    assert data.tolist() == [6.0] * 4  # one warm-up and one replay each; a capture itself computes nothing


def test_simulated_device_answers_for_meta_tensors() -> None:
    other = CudaDevice(0, Simulated(**CUDA))
    with devices.simulated(other):
        assert devices.live() is other
        assert devices.of(torch.empty(1, device="meta")) is other
        assert devices.of(torch.empty(1)).kind == "cpu"
    assert devices.live() is not other
