"""Marks of launches that take turns: what one sets the other sees, and nobody is led elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegate.turns import Marks, go, rounds_of


def test_a_mark_is_seen_by_everybody_with_the_folder(tmp_path: Path) -> None:
    one, other = Marks(tmp_path / "turns"), Marks(tmp_path / "turns")
    assert not other.has(go(0))
    one.set(go(0))
    one.set(go(0))
    assert other.has(go(0))
    other.wait(go(0))
    for marks in (one, other):
        marks.close()


def test_links_that_a_launch_puts_there_lead_nobody_elsewhere(tmp_path: Path) -> None:
    folder, outside = tmp_path / "turns", tmp_path / "outside"
    marks = Marks(folder)
    (folder / go(0)).symlink_to(outside)
    with pytest.raises(OSError, match="symbolic links"):
        marks.set(go(0))
    (tmp_path / "real").touch()
    (folder / "ready").symlink_to(tmp_path / "real")
    assert not marks.has("ready")
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path)
    marks.set("end")
    assert not (tmp_path / "end").exists()
    assert not outside.exists()
    with pytest.raises(OSError, match=r"."):
        Marks(folder)


def test_every_launch_has_each_round_once() -> None:
    assert sorted(rounds_of([0, 1], 2)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
