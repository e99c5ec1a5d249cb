"""What `prune` says it removed is gone."""

import pytest
from docker.errors import APIError

from orchestrator.commands.prune import _removed


def test_a_thing_in_use_stays_and_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    gone: list[str] = []

    def refuse(ident: str) -> None:
        raise APIError("409", explanation=f"{ident} is in use by a container")

    assert not _removed("moegate/cpu:1", refuse, "sha256:1")
    assert capsys.readouterr().err == "note: moegate/cpu:1 stays: sha256:1 is in use by a container\n"
    assert _removed("moegate/cpu:2", gone.append, "sha256:2")
    assert gone == ["sha256:2"]
