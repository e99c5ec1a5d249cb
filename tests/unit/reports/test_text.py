"""Cleaning, clipping and writing numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegate.text import clean
from reports.text import (
    DASH,
    MINUS,
    TIMES,
    clip,
    count,
    duration,
    number,
    one_line,
    percent,
    points,
    slug,
    tail,
    value,
)

BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[38;5;196;1mred\x1b[m", "red"),
        ("\x9b31mred", "red"),
        ("\x1b]8;;http://evil.example\x07link\x1b]8;;\x07", "link"),
        ("\x1b]0;title\x1b\\text", "text"),
        ("\x1bcreset", "reset"),
        ("a\x00b\x07c\x7fd\x85e", "abcde"),
        ("one\r\ntwo\rthree\tfour", "one\ntwo\nthree\tfour"),
        (f"user{BIDI}name", "username"),
        ("zero\u200bwidth\ufeff", "zerowidth"),
        ("line\u2028sep\u2029", "linesep"),
        ("bad \ud800 surrogate", "bad \ufffd surrogate"),
        ("\ufdd0\ufffe\uffff", "\ufffd\ufffd\ufffd"),
        ("\U000e0041tag", "tag"),
        ("Größe 漢字 ▲ 1\u202f000", "Größe 漢字 ▲ 1\u202f000"),
    ],
)
def test_clean_leaves_text_only(raw: str, expected: str) -> None:
    assert clean(raw) == expected


@given(st.text(st.characters(exclude_categories=())))
def test_clean_output_is_always_utf8_without_controls(raw: str) -> None:
    shown = clean(raw)
    shown.encode("utf-8")
    assert not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) <= 0x9F for c in shown)
    assert not any(c in BIDI for c in shown)
    assert clean(shown) == shown


def test_escape_sequences_never_swallow_text_after_an_unfinished_one() -> None:
    assert clean("before \x1b[ after \x1b[0m end").endswith("end")
    assert clean("\x1b]0;unfinished\nnext line\nlast") == "\nnext line\nlast"


def test_one_line_and_clip() -> None:
    assert one_line("a\n b\t\tc") == "a b c"
    assert one_line("x" * 500, 10) == "x" * 9 + "…"
    assert clip("short", 10) == "short"


def test_tail_keeps_whole_lines_from_the_end() -> None:
    log = "\n".join(f"line {i}" for i in range(1000))
    shown = tail(log, 60)
    assert shown.startswith("…\n")
    assert shown.endswith("line 998\nline 999")
    assert len(shown) <= 64
    assert tail("x" * 10**6 + "\nend", 100) == "end"
    assert len(tail("y" * 10**6, 1000)) <= 401


@pytest.mark.parametrize(
    ("fraction", "shown"),
    [
        (0.052, "+5.2 %"),
        (-0.052, f"{MINUS}5.2 %"),
        (-0.00001, "0.0 %"),
        (None, DASH),
        (float("nan"), DASH),
        (11.0, f"{TIMES}12.0"),
    ],
)
def test_percent(fraction: float | None, shown: str) -> None:
    assert percent(fraction) == shown


def test_numbers() -> None:
    assert [points(p) for p in (0.012, -0.0049, 0.00001)] == ["+1.20 points", f"{MINUS}0.49 points", "0.00 points"]
    assert number(1234567.8) == "1\u202f234\u202f568"
    assert number(-0.012345) == f"{MINUS}0.01235"
    assert value(4.1, "tok/s") == "4.100 tok/s"
    assert value(None) == DASH
    assert count(1, "cell") == "1 cell"
    assert count(2, "launch", "launches") == "2 launches"
    assert [duration(s) for s in (0.0123, 12.34, 245.0, 7800.0)] == ["12 ms", "12.3 s", "4 min 05 s", "2 h 10 min"]


def test_slug_is_safe_as_an_anchor() -> None:
    assert slug('a"><b> ü/..') == "a-b-u-.."
    assert slug("\u202e") == "x"


def test_numbers_beyond_reading_are_short() -> None:
    assert number(1e300) == "1.000e+300"
    assert number(-1e-300) == f"{MINUS}1.000e-300"
    assert percent(1e60) == f"{TIMES}1.0e+60"
    assert duration(1e300) == "1.000e+300 s"
    assert len(value(1e308, "tok/s")) < 20
