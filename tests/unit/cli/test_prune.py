"""What `prune` says it removed is gone."""

import os
import platform
import time
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError

from orchestrator.commands.prune import _containers, _removed


def test_a_thing_in_use_stays_and_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    gone: list[str] = []

    def refuse(ident: str) -> None:
        raise APIError("409", explanation=f"{ident} is in use by a container")

    assert not _removed("moegate/cpu:1", refuse, "sha256:1")
    assert capsys.readouterr().err == "note: moegate/cpu:1 stays: sha256:1 is in use by a container\n"
    assert _removed("moegate/cpu:2", gone.append, "sha256:2")
    assert gone == ["sha256:2"]


def container(ident: str, state: str, age_s: float, owner: str) -> dict[str, Any]:
    return {"Id": ident, "State": state, "Created": time.time() - age_s, "Labels": {"moegate.owner": owner}}


def test_containers_go_when_they_are_old_or_nobody_waits_for_them() -> None:
    here, dead = platform.node(), 2**22 + 1  # above the kernel's highest process number
    found = [
        container("old", "exited", 7200, f"{here}:{os.getpid()}"),
        container("young", "exited", 60, f"{here}:{os.getpid()}"),
        container("working", "running", 7200, f"{here}:{os.getpid()}"),
        container("orphan", "running", 60, f"{here}:{dead}"),
        container("elsewhere", "running", 7200, f"another-host:{dead}"),
        container("nameless", "running", 7200, ""),
    ]
    gone: list[str] = []
    api = SimpleNamespace(containers=lambda **_: found, remove_container=lambda ident, **_: gone.append(ident))
    assert _containers(SimpleNamespace(api=api), 3600, dry_run=True) == ["old", "orphan"]
    assert gone == []
    assert _containers(SimpleNamespace(api=api), 3600, dry_run=False) == gone == ["old", "orphan"]
