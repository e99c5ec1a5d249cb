"""Secrets do not leave the machine in a log: what looks like one, or is one of our environment's, is masked.

A launch gets none of our environment's secrets (`moegate.spawn.child_env`). But process isolation shares a home folder,
and a tool may print what it finds there; so what a launch wrote is masked before it is kept, shown or sent.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, quote_plus

__all__ = ["MASK", "looks_secret", "mask", "mask_bytes", "mask_file", "spellings"]

MASK = "[masked]"
_SHORTEST = 8  # shorter values would mask ordinary words

_NAME = re.compile(
    r"(?i)(?:^|.*_)(?:TOKENS?|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|PAT)"
)
# What issuers make: a prefix that nothing else has, and enough characters after it.
_SHAPE = re.compile(
    rb"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{20,}"
    rb"|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}|AKIA[A-Z0-9]{16}\b"
    rb"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,})"
    rb"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[A-Za-z0-9+/=\s\\]{0,16384}(?:-----END [A-Z ]{0,40}PRIVATE KEY-----)?"
)


def looks_secret(name: str, value: str = "") -> bool:
    """Whether a variable's name says that it is a secret, or its value has the shape of an issued one."""
    return _NAME.fullmatch(name) is not None or _SHAPE.search(value.encode("utf-8", "surrogateescape")) is not None


def spellings(value: str) -> frozenset[bytes]:
    """The ways in which a value can stand in a text: plain, in hex, in a URL, in JSON, and in base64 at any place."""
    raw = value.encode("utf-8", "surrogateescape")
    found = {
        raw,
        raw.hex().encode(),
        raw.hex().upper().encode(),
        quote(raw, safe="").encode(),
        quote_plus(raw).encode(),
    }
    for spelt in (value, *value.splitlines()):  # one of several lines is shown line by line as well
        found.add(spelt.encode("utf-8", "surrogateescape"))
        for ascii_only in (True, False):
            found.add(json.dumps(spelt, ensure_ascii=ascii_only)[1:-1].encode("utf-8", "surrogateescape"))
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for before in range(3):
            # Of characters that also hold bits of a neighbour nothing is known: they are left out.
            first, last = (before * 8 + 5) // 6, (before + len(raw)) * 8 // 6
            found.add(encode(b"\0" * before + raw)[first:last])
    return frozenset(text for text in found if len(text) >= _SHORTEST)


def mask_bytes(data: bytes, env: Mapping[str, str] | None = None) -> bytes:
    """Mask what has the shape of a secret, and every spelling of the secrets in `env` (default: our environment)."""
    held = os.environ if env is None else env
    values = tuple(sorted(value for name, value in held.items() if looks_secret(name) and len(value) >= _SHORTEST))
    data = _SHAPE.sub(MASK.encode(), data)
    pattern = _pattern(values)
    return data if pattern is None else pattern.sub(MASK.encode(), data)


def mask(text: str, env: Mapping[str, str] | None = None) -> str:
    """As `mask_bytes`, for text."""
    raw = text.encode("utf-8", "surrogatepass")
    return mask_bytes(raw, env).decode("utf-8", "surrogatepass")


def mask_file(path: Path) -> None:
    """Mask a finished log in place; what cannot be read or written is left as it is."""
    try:
        data = path.read_bytes()
        masked = mask_bytes(data)
        if masked != data:
            path.write_bytes(masked)
    except OSError:
        return


@functools.lru_cache(maxsize=4)
def _pattern(values: tuple[str, ...]) -> re.Pattern[bytes] | None:
    words = sorted({word for value in values for word in spellings(value)}, key=len, reverse=True)
    return re.compile(b"|".join(map(re.escape, words))) if words else None
