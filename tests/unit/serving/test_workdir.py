"""Working folders of launches: removed at the end, and of dead launches by the next one."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving import workdir


def test_only_folders_of_dead_launches_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = tmp_path / "moegate-serve-dead"
    dead.mkdir()
    (dead / ".owner").touch()
    (dead / "server.log").write_text("x")
    strange = tmp_path / "moegate-serve-strange"
    strange.mkdir()
    with workdir.work_folder() as first:
        assert not dead.exists()
        assert strange.is_dir(), "nobody's launch: not ours to remove"
        (first / "file").touch()
        with workdir.work_folder() as second:
            assert first != second
            assert first.is_dir(), "its launch is alive"
        assert not second.exists()
        assert workdir.sweep(tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == [strange.name]


def test_a_launch_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(KeyError), workdir.work_folder():
        raise KeyError
    assert list(tmp_path.iterdir()) == []
