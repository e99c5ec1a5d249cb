"""Inputs that are there and whole, and room for a container, before a launch."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from moegate.records import DeviceIdentity
from orchestrator.pools.isolation import LaunchSpec, preflight
from orchestrator.pools.isolation.process import ProcessIsolation
from orchestrator.pools.slots import HostDevice, Slot


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    for number in (1, 2):
        (folder / f"model-{number}.safetensors").write_bytes(b"x")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def test_whole_weights_and_other_inputs_pass(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert preflight.unreadable([weights, tmp_path / "config.json", tmp_path]) is None


@pytest.mark.parametrize("how", ["missing", "empty"])
def test_a_half_copied_checkpoint_is_said(weights: Path, how: str) -> None:
    (weights / "model-2.safetensors").unlink()
    if how == "empty":
        (weights / "model-2.safetensors").touch()
    said = preflight.unreadable([weights])
    assert said is not None
    assert "1 of 2 files are missing or empty, first model-2.safetensors" in said


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_said(weights: Path, text: str) -> None:
    (weights / "model.safetensors.index.json").write_text(text)
    assert "is not an index of weights" in (preflight.unreadable([weights]) or "")


def test_names_that_no_file_can_have_are_not_there(weights: Path) -> None:
    assert "is not on this host" in (preflight.unreadable([Path("/" + "x" * 300)]) or "")
    index = {"weight_map": {"a": "y" * 300, "b": "model-1.safetensors", "c": "z\0"}}
    (weights / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "2 of 3 files are missing or empty, first yyy" in (preflight.unreadable([weights]) or "")
    assert preflight.no_room("/" + "x" * 300) is None


def test_a_launch_without_its_weights_is_infrastructure_and_starts_nothing(tmp_path: Path) -> None:
    slot = Slot("p", 0, HostDevice(DeviceIdentity("cpu", "c", "cpu:x")))
    spec = LaunchSpec("r", "c", 1, 0, ("touch", "started"), tmp_path, tmp_path / "o", tmp_path / "e", 9.0, slot,
                      reads=(Path("/srv/models/not-here"),))  # fmt: skip
    result = ProcessIsolation().run(spec, on_start=lambda kind, ident: None, cancel=threading.Event())
    assert result.infra is not None
    assert "/srv/models/not-here is not on this host" in result.infra
    assert not (tmp_path / "started").exists()


def test_a_full_daemon_is_said_and_a_remote_one_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert preflight.no_room(str(tmp_path), need=1) is None
    assert preflight.no_room("/another/host/docker") is None
    assert preflight.no_room("") is None
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 << 20))
    assert preflight.no_room(str(tmp_path)) == (
        f"100 MiB are free in {tmp_path}, a launch needs 2048 (fix: orchestrator prune)"
    )
