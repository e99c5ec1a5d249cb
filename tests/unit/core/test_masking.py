"""Secrets are masked in every spelling, and ordinary text is left alone."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegate.masking import MASK, looks_secret, mask, mask_file

SECRET = 'correct horse/"battery"+staple='
ENV = {"HF_TOKEN": SECRET, "LANG": "C.UTF-8", "SHORT_TOKEN": "abc"}


@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        quote(SECRET, safe=""),
        json.dumps(SECRET),
        SECRET.encode().hex(),
        base64.b64encode(SECRET.encode()).decode(),
        base64.b64encode(b"user:" + SECRET.encode() + b"\n").decode(),
        base64.urlsafe_b64encode(b"ab" + SECRET.encode()).decode(),
    ],
)
def test_every_spelling_is_masked(text: str) -> None:
    masked = mask(f"before {text} after", ENV)
    assert MASK in masked
    assert masked.startswith("before ")
    assert masked.endswith(" after")
    for word in ("battery", SECRET.encode().hex()[8:24], base64.b64encode(SECRET.encode()).decode()[8:16]):
        assert word not in masked


LINES = 'first line of it\n"second" line\\of it\npässwörtchen'


@pytest.mark.parametrize(
    "text",
    [LINES, json.dumps(LINES), json.dumps(LINES, ensure_ascii=False), *LINES.splitlines(), json.dumps("pässwörtchen")],
)
def test_a_secret_of_several_lines_is_masked_whole_in_json_and_line_by_line(text: str) -> None:
    masked = mask(f"before {text} after", {"DEPLOY_SECRET": LINES})
    assert MASK in masked
    assert not any(word in masked for word in ("first", "second", "tchen"))
    assert (masked[:7], masked[-6:]) == ("before ", " after")


@given(st.binary(max_size=5), st.binary(max_size=5))
def test_base64_hides_nothing_at_any_place(before: bytes, after: bytes) -> None:
    text = base64.b64encode(before + b"0123456789abcdefghij" + after).decode()
    assert MASK in mask(text, {"API_KEY": "0123456789abcdefghij"})


@pytest.mark.parametrize(
    "text",
    [
        "hf_" + "aB3" * 10,
        "ghp_" + "x1" * 18,
        "github_pat_" + "11AAAA_" * 5,
        "AKIA" + "ABCD" * 4,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijklmnop",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----",
        r"-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_what_issuers_make_is_masked_whoever_holds_it(text: str) -> None:
    assert mask(f"x={text}\n", {}) == f"x={MASK}\n"


@pytest.mark.parametrize("text", ["hf_model", "task-sk-1", "AKIA", "a token of 8 tokens", "gh_p", "é\ud800"])
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert mask(text, ENV) == text


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("GITHUB_TOKEN", True),
        ("API_KEY", True),
        ("DB_PASSWORD", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("MAX_TOKENS_PER_STEP", False),
        ("PATH", False),
        ("TRITON_CACHE_DIR", False),
    ],
)
def test_which_names_say_so(name: str, secret: bool) -> None:
    assert looks_secret(name) is secret


def test_a_log_is_masked_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    log = tmp_path / "log"
    log.write_bytes(b"\xff" + SECRET.encode() + b"\n")
    mask_file(log)
    assert log.read_bytes() == b"\xff" + MASK.encode() + b"\n"
    mask_file(tmp_path / "none")
