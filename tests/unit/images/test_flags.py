"""The container flags of one device per vendor: the reviewed table, and cards that were renumbered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moegate.records import DeviceIdentity, ImageSpec
from orchestrator import daemon
from orchestrator.pools.isolation import LaunchSpec, flags
from orchestrator.pools.isolation import docker as isolation
from orchestrator.pools.isolation.docker import container_options
from orchestrator.pools.isolation.flags import FLAGS, MASKS, device_options
from orchestrator.pools.isolation.shell import shell_command
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


def test_cdi_is_used_where_the_daemon_knows_this_very_device() -> None:
    plain = [{"DeviceIDs": ["GPU-6f1c"], "Capabilities": [["gpu"]]}]
    named = [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=GPU-6f1c"]}]
    known = {"nvidia.com/gpu=GPU-6f1c", "nvidia.com/gpu=all", "nvidia.com/gpu=0"}
    assert device_options(DEVICES["cuda"], cdi=known)["device_requests"] == named
    assert device_options(DEVICES["cuda"], cdi={"nvidia.com/gpu=0", "nvidia.com/gpu=all"})["device_requests"] == plain


INFO = {
    "20.10": {},
    "27.0": {"CDISpecDirs": ["/etc/cdi"]},
    "28.2": {"CDISpecDirs": ["/etc/cdi"], "DiscoveredDevices": None},
    "29.0": {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}, {"Source": "other", "ID": "x"}]},
}


@pytest.mark.parametrize("version", sorted(INFO))
def test_what_a_daemon_says_of_its_devices(version: str) -> None:
    api = SimpleNamespace(api_version="1.41", base_url="unix")
    told = daemon.facts(SimpleNamespace(info=lambda: INFO[version], api=api))
    assert told.cdi == ({"nvidia.com/gpu=0"} if version == "29.0" else set())


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
        "cache": "moegate-cache-0123456789ab-cuda-nvidia-h200",
    }
    assert {name: options[name] for name in expected} == expected
    assert not options["user"].startswith("0:")
    assert options["mounts"] == {str(tmp_path): False}
    labels = options["labels"]
    assert (labels["moegate.run"], labels["moegate.cell"], labels["moegate.attempt"]) == ("run-1", "cell-1", "2")


def test_an_arms_own_environment_is_read_only_and_its_python_runs(tmp_path: Path) -> None:
    own = Path("/home/ci/.cache/moegate/sources/abc")
    options = container_options(launch("cpu", tmp_path, python=own / "bin" / "python", reads=(own,)), "sha256:0")
    assert options["mounts"] == {str(own): True, str(tmp_path): False}
    assert options["command"][0] == str(own / "bin" / "python")


def test_the_command_to_reproduce_says_what_was_done(tmp_path: Path) -> None:
    spec = launch("cuda", tmp_path, reads=(Path("/models/tiny"),))
    command = shell_command(container_options(spec, "sha256:0123456789abcdef"))
    assert command[:3] == ("docker", "run", "--rm")
    assert command[-6:] == ("sha256:0123456789abcdef", "/opt/moegate/bin/python", "-P", "-m", "tuner", "bench")
    assert {
        "--network=none",
        "--read-only",
        "--gpus=device=GPU-6f1c",
        "--ulimit=memlock=-1",
        "--volume=/models/tiny:/models/tiny:ro",
    } <= set(command)
    named = shell_command(container_options(spec, "sha256:0", cdi={"nvidia.com/gpu=GPU-6f1c"}))
    assert "--device=nvidia.com/gpu=GPU-6f1c" in named


SENT = {
    "cpu": {"Devices": None, "DeviceRequests": None, "GroupAdd": None, "ShmSize": GIB, "Ulimits": []},
    "cuda": {
        "Devices": None,
        "DeviceRequests": [
            {"Driver": "", "Count": 0, "DeviceIDs": ["GPU-6f1c"], "Capabilities": [["gpu"]], "Options": {}}
        ],
        "GroupAdd": None,
        "ShmSize": 8 * GIB,
        "Ulimits": [{"Name": "memlock", "Soft": -1, "Hard": -1}, {"Name": "stack", "Soft": 64 << 20, "Hard": 64 << 20}],
    },
    "rocm": {
        "Devices": [
            {"PathOnHost": path, "PathInContainer": path, "CgroupPermissions": "rw"}
            for path in ("/dev/kfd", "/dev/dri/renderD133")
        ],
        "DeviceRequests": None,
        "GroupAdd": ["992"],
        "SecurityOpt": ["no-new-privileges:true", "seccomp=unconfined"],
    },
    "xpu": {
        "Devices": [
            {"PathOnHost": path, "PathInContainer": path, "CgroupPermissions": "rw"}
            for path in ("/dev/dri/card2", "/dev/dri/renderD130")
        ],
        "DeviceRequests": None,
        "GroupAdd": ["44", "992"],
    },
}


@pytest.mark.parametrize("kind", sorted(SENT))
def test_what_the_daemon_is_sent(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request body as the library makes it of our options: what a daemon really reads."""
    import docker

    monkeypatch.setattr(flags, "_group_of", GROUPS.__getitem__)
    options = container_options(launch(kind, tmp_path, memory_bytes=8 * GIB), "sha256:0", cdi=())
    client = docker.DockerClient(base_url="unix:///nowhere/docker.sock", version="1.45")
    sent: dict[str, Any] = {}
    monkeypatch.setattr(
        client.api, "create_container_from_config", lambda config, *_: sent.update(config) or {"Id": "a"}
    )
    monkeypatch.setattr(client.api, "create_volume", lambda *_, **__: {"Name": "v"})
    monkeypatch.setattr(client.api, "inspect_container", lambda ident: {"Id": ident})
    assert isolation._create(client, options) == "a"
    host = sent["HostConfig"]
    assert {name: host.get(name) for name in SENT[kind]} == SENT[kind]
    confined = {"NetworkMode": "none", "ReadonlyRootfs": True, "CapDrop": ["ALL"], "Init": True, "PidsLimit": 1024}
    assert {name: host[name] for name in confined} == confined
    assert (host["Memory"], host["MemorySwap"], host["CpusetCpus"]) == (8 * GIB, 8 * GIB, "4,5")
    assert sent["Entrypoint"] == []
    client.close()
