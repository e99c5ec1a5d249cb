"""The journal: what was written is read back, a torn tail is cut, a hole is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moegate import journal
from moegate.errors import InfraError, RecordError
from moegate.journal import Journal


def written(path: Path, count: int = 3) -> Path:
    with Journal.open(path) as log:
        for number in range(count):
            log.append("step", number=number, text="é\n")
    return path


def test_what_is_written_is_read_back_in_order(tmp_path: Path) -> None:
    entries = journal.read(written(tmp_path / "journal"))
    assert [entry.kind for entry in entries] == ["journal", "step", "step", "step"]
    assert [entry.seq for entry in entries] == [0, 1, 2, 3]
    assert entries[2].data == {"number": 1, "text": "é\n"}


def test_reopening_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    with Journal.open(path) as log:
        assert log.append("more") == 4
    assert [entry.kind for entry in journal.read(path)][-1] == "more"


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_torn_tail_is_cut_and_the_journal_goes_on(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "journal")
    os.truncate(path, path.stat().st_size - cut)
    assert len(journal.read(path)) == 3
    with Journal.open(path) as log:
        assert log.append("after") == 3
    assert [entry.kind for entry in journal.read(path)] == ["journal", "step", "step", "after"]


def test_every_possible_truncation_is_survived(tmp_path: Path) -> None:
    path = written(tmp_path / "journal", 2)
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert len(journal._parse(path, "run")[0]) == sum(end <= size for end in ends)


def test_nul_bytes_after_a_power_cut_are_a_torn_tail(tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    with path.open("ab") as stream:
        stream.write(b"\0" * 64)
    assert len(journal.read(path)) == 4


@pytest.mark.parametrize("content", [b"shopping list", b"shopping list\n", b'{"some": "json"}', b"[1]\n", b"\0\0x"])
def test_a_file_of_somebody_elses_is_not_cut_off(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(RecordError, match="somebody's file"):
        Journal.open(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b'{"da', b'{"da\0\0', b'{"data":{"purpose":"r'])
def test_a_header_that_was_never_finished_is_cut_off(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    Journal.open(path).close()
    assert [entry.kind for entry in journal.read(path)] == ["journal"]


def test_damage_in_the_middle_is_refused_with_the_entrys_number(tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b'"number":1', b'"number":7')
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(RecordError, match="entry 2 is damaged") as error:
        Journal.open(path)
    assert error.value.line == 3


@pytest.mark.parametrize("edit", ["duplicate", "drop"])
def test_a_line_twice_or_missing_is_damage(tmp_path: Path, edit: str) -> None:
    path = written(tmp_path / "journal")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[1:] if edit == "duplicate" else lines[:1] + lines[2:]))
    with pytest.raises(RecordError, match="damaged"):
        journal.read(path)


_MALFORMED = (
    "[]",
    "1",
    '{"seq":2}',
    '{"data":{},"kind":"step","seq":"2","time":""}',
    '{"data":[],"kind":"step","seq":2,"time":""}',
    '{"data":{},"kind":7,"seq":2,"time":""}',
    '{"data":{"x":NaN},"kind":"step","seq":2,"time":""}',
    '{"data":{"x":-1e999},"kind":"step","seq":2,"time":""}',
    "[" * 100_000 + "}",
)


@pytest.mark.parametrize("body", _MALFORMED)
def test_a_right_sum_does_not_make_an_entry(tmp_path: Path, body: str) -> None:
    path = written(tmp_path / "journal")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = f'{body[:-1]},"sum":"{journal._sum(body[:-1] + "}")}"}}\n'.encode()
    path.write_bytes(b"".join(lines))
    with pytest.raises(RecordError, match="entry 2 is damaged"):
        journal.read(path)


def test_a_file_that_no_journal_can_be_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    os.truncate(path, 1 << 40)
    with pytest.raises(RecordError, match="a journal has at most"):
        journal.read(path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/full")], ids=["pipe", "device"])
def test_what_is_no_file_is_neither_waited_for_nor_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "journal"
    make(path)
    with pytest.raises(RecordError, match="journal: is not a regular file"):
        Journal.open(path)
    assert path.exists()


def test_a_second_writer_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    with Journal.open(path):
        before = path.read_bytes()
        with pytest.raises(InfraError, match="another process"):
            Journal.open(path)
        assert path.read_bytes() == before


def test_another_purpose_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="not a journal of a tune"):
        journal.read(written(tmp_path / "journal"), purpose="tune")


def test_nan_cannot_enter_a_journal(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal") as log, pytest.raises(ValueError, match="not JSON compliant"):
        log.append("step", value=float("nan"))
    assert len(journal.read(tmp_path / "journal")) == 1


def test_a_full_disk_takes_the_entry_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal.open(tmp_path / "journal") as log:
        real = os.write
        monkeypatch.setattr(os, "write", lambda stream, data: real(stream, data[:5]))
        with pytest.raises(InfraError, match="No space left"):
            log.append("step")
        monkeypatch.undo()
        assert log.append("later") == 1
    assert [entry.kind for entry in journal.read(tmp_path / "journal")] == ["journal", "later"]


def test_an_empty_journal_is_one_that_was_never_begun(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.touch()
    assert journal.read(path) == []
    with Journal.open(path) as log:
        assert log.append("step") == 1


def test_line_ends_of_another_system_are_damage(tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(RecordError, match="entry 0 is damaged"):
        journal.read(path)
