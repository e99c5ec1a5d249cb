"""Text of others on a terminal and in a workflow's log."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegate.text import plain, workflow_command

COMMAND = re.compile(r"::error file=[^:,]*,line=3,title=[^:,]*::.*")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("E=8,N=64.json", "E=8,N=64.json"),
        ("a\x1b[2Jb\n::error::c\u202e", r"a\x1b[2Jb\n::error::c\u202e"),
        ("\x9b31m \ud800 \U000e0041", r"\x9b31m \ud800 \U000e0041"),
        ("Grüße, 漢字", "Grüße, 漢字"),
    ],
)
def test_plain_writes_out_what_could_steer_a_terminal(text: str, shown: str) -> None:
    assert plain(text) == shown


@given(st.text())
def test_plain_is_one_printable_line_and_stays_so(text: str) -> None:
    shown = plain(text)
    assert shown.isprintable()
    assert plain(shown) == shown


@given(st.text())
def test_no_text_ends_a_workflow_command_or_opens_another(text: str) -> None:
    line = workflow_command("error", text, file=text or "x", line="3", title=text or "x")
    assert len(line.splitlines()) == 1
    assert "##[" not in line
    assert line.startswith("::error ")
    if "file=" in line and "title=" in line:
        assert COMMAND.fullmatch(line)


def test_a_workflow_command_is_bounded_and_leaves_out_what_is_not_known() -> None:
    assert workflow_command("warning", "50 % of\nx", file="a,b:c%.json", line="", title="r") == (
        "::warning file=a%2Cb%3Ac%25.json,title=r::50 %25 of x"
    )
    assert len(workflow_command("error", "x" * 10**6, title="y" * 10**6)) < 1000
    assert workflow_command("error", "::add-mask::secret\r\n::stop-commands::x") == (
        "::error ::::add-mask::secret ::stop-commands::x"
    )
