"""The container flags of one device per vendor: the reviewed table, and cards that were renumbered."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegate.records import DeviceIdentity, ImageSpec
from orchestrator.pools.isolation import LaunchSpec
from orchestrator.pools.isolation.docker import container_options, shell_command
from orchestrator.pools.isolation.flags import FLAGS, MASKS, device_options
from orchestrator.pools.slots import HostDevice, Slot

GIB = 1 << 30
DEVICES = {
    "cpu": HostDevice(DeviceIdentity("cpu", "EPYC", "cpu:host")),
    "cuda": HostDevice(DeviceIdentity("cuda", "NVIDIA H200", "GPU-6f1c"), ordinal=3),
    "rocm": HostDevice(
        DeviceIdentity("rocm", "AMD Instinct MI300X", "0xa1"), ordinal=5, nodes=("/dev/kfd", "/dev/dri/renderD133")
    ),
    "xpu": HostDevice(
        DeviceIdentity("xpu", "Intel(R) Arc(TM) Pro B60 Graphics", "0000:83:00.0"),
        ordinal=2,
        nodes=("/dev/dri/card2", "/dev/dri/renderD130"),
    ),
}
GROUPS = {"/dev/kfd": 992, "/dev/dri/card2": 44, "/dev/dri/renderD130": 992, "/dev/dri/renderD133": 992}

# Reviewed against the vendors' container documentation; a change here is a change of what a container may reach.
GOLDEN = {
    "cpu": {"devices": [], "group_add": [], "mounts": [], "security_opt": [], "device_requests": []},
    "cuda": {
        "devices": [],
        "group_add": [],
        "mounts": [],
        "security_opt": [],
        "device_requests": [{"DeviceIDs": ["GPU-6f1c"], "Capabilities": [["gpu"]]}],
    },
    "rocm": {
        "devices": ["/dev/kfd:/dev/kfd:rw", "/dev/dri/renderD133:/dev/dri/renderD133:rw"],
        "group_add": [992],
        "mounts": [],
        "security_opt": ["seccomp=unconfined"],
        "device_requests": [],
    },
    "xpu": {
        "devices": ["/dev/dri/card2:/dev/dri/card2:rw", "/dev/dri/renderD130:/dev/dri/renderD130:rw"],
        "group_add": [44, 992],
        "mounts": ["/dev/dri/by-path"],
        "security_opt": [],
        "device_requests": [],
    },
}
LIMITS = {
    "cpu": (GIB, {}),
    "cuda": (16 * GIB, {"memlock": -1, "stack": 64 << 20}),
    "rocm": (16 * GIB, {"memlock": -1}),
    "xpu": (16 * GIB, {}),
}


@pytest.mark.parametrize("kind", sorted(FLAGS))
def test_flags_equal_the_reviewed_table(kind: str) -> None:
    options = device_options(DEVICES[kind], group_of=GROUPS.__getitem__)
    assert {name: options[name] for name in GOLDEN[kind]} == GOLDEN[kind]
    assert (options["shm_size"], options["ulimits"]) == LIMITS[kind]


def test_cdi_is_used_where_the_daemon_has_it() -> None:
    options = device_options(DEVICES["cuda"], cdi=True)
    assert options["device_requests"] == [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=GPU-6f1c"]}]


def test_root_owned_devices_add_no_group() -> None:
    assert device_options(DEVICES["xpu"], group_of=lambda path: 0)["group_add"] == []


def launch(kind: str, folder: Path, **changes: object) -> LaunchSpec:
    values: dict[str, object] = {
        "run": "run-1",
        "cell": "cell-1",
        "attempt": 2,
        "number": 7,
        "argv": ("{python}", "-P", "-m", "tuner", "bench"),
        "workdir": folder,
        "stdout": folder / "out",
        "stderr": folder / "err",
        "timeout_s": 60.0,
        "slot": Slot("pool", 0, DEVICES[kind], (4, 5)),
        "image": ImageSpec(name="cpu"),
        "env": dict.fromkeys(MASKS, "3") | {"TRITON_INTERPRET": "1"},
    }
    return LaunchSpec(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_device_is_never_masked_a_second_time(kind: str, tmp_path: Path) -> None:
    options = container_options(launch(kind, tmp_path), "sha256:0123456789abcdef")
    assert not MASKS & set(options["environment"])
    assert options["environment"]["TRITON_INTERPRET"] == "1"


def test_a_missing_device_file_is_an_error_and_not_a_missing_flag(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"renderD133|kfd"):
        container_options(launch("rocm", tmp_path), "sha256:0")


def test_confinement_is_the_same_for_every_launch(tmp_path: Path) -> None:
    options = container_options(launch("cuda", tmp_path, pids=99, memory_bytes=8 * GIB), "sha256:0123456789abcdef")
    expected = {
        "network_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "pids_limit": 99,
        "mem_limit": 8 * GIB,
        "memswap_limit": 8 * GIB,
        "cpuset_cpus": "4,5",
        "shm_size": 8 * GIB,
        "init": True,
        "cache": "moegate-cache-0123456789ab-cuda",
    }
    assert {name: options[name] for name in expected} == expected
    assert not options["user"].startswith("0:")
    assert options["mounts"] == {str(tmp_path): False}
    labels = options["labels"]
    assert (labels["moegate.run"], labels["moegate.cell"], labels["moegate.attempt"]) == ("run-1", "cell-1", "2")


def test_an_arms_own_source_is_mounted_once_and_read_only(tmp_path: Path) -> None:
    env = {"PYTHONPATH": "/runs/sources/abc:/runs/sources/abc/kernels"}
    options = container_options(launch("cpu", tmp_path, env=env), "sha256:0")
    assert options["mounts"] == {"/runs/sources/abc": True, str(tmp_path): False}


def test_the_command_to_reproduce_says_what_was_done(tmp_path: Path) -> None:
    spec = launch("cuda", tmp_path, reads=(Path("/models/tiny"),))
    command = shell_command(container_options(spec, "sha256:0123456789abcdef"))
    assert command[:3] == ("docker", "run", "--rm")
    assert command[-6:] == ("sha256:0123456789abcdef", "/opt/moegate/bin/python", "-P", "-m", "tuner", "bench")
    assert {"--network=none", "--read-only", "--gpus=device=GPU-6f1c", "--volume=/models/tiny:/models/tiny:ro"} <= set(
        command
    )
