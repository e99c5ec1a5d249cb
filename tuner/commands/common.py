"""What the commands share: option texts to values, results to files."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from moegate.canonical import whole
from moegate.configs import BATCH_SIZES
from moegate.errors import UsageError
from moegate.records import Measurement, to_json, write
from tuner.commands import MOST_TOKENS

__all__ = ["INTERPRETED", "answer_stream", "interpreter_of", "parse_budget", "parse_sizes", "print_json", "publish"]

INTERPRETED = "Triton's interpreter: these times say nothing about hardware"
"""What every command says with times that are not those of a device."""

_NUMBER = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*"
_BUDGET = re.compile(rf"(?:{_NUMBER}d)?\s*(?:{_NUMBER}h)?\s*(?:{_NUMBER}m(?:in)?)?\s*(?:{_NUMBER}s)?")
_SECONDS = (86400.0, 3600.0, 60.0, 1.0)


def parse_sizes(text: str, default: Sequence[int] = BATCH_SIZES) -> tuple[int, ...]:
    """`1,2,4` as ascending numbers; `default` for an empty text. UsageError for anything else."""
    if not text.strip():
        return tuple(default)
    sizes = set()
    for part in text.split(","):
        word = part.strip()
        size = whole(word, 1, MOST_TOKENS)
        if size is None:
            raise UsageError(
                f"{word!r:.40} is no batch size", field="--batch-sizes",
                fix=f"numbers from 1 to {MOST_TOKENS}, such as 1,2,4,8",
            )  # fmt: skip
        sizes.add(size)
    return tuple(sorted(sizes))


def parse_budget(text: str | None) -> float | None:
    """`45s`, `3m`, `1h30m` as in a matrix, `1.5h` or bare seconds; None for none. UsageError for anything else."""
    if text is None:
        return None
    word = text.strip()
    match = _BUDGET.fullmatch(f"{word}s" if re.fullmatch(_NUMBER, word) else word)
    parts = () if match is None else match.groups()
    total = sum(float(part or 0) * unit for part, unit in zip(parts, _SECONDS, strict=False))
    if total <= 0:
        raise UsageError(f"{text!r:.40} is no duration", field="--budget", fix="write it as 45s, 3m or 1h30m")
    return total


def interpreter_of(text: str | None) -> str:
    """What `--python` says as an absolute path (children have a folder of their own); this interpreter for None.

    Links stay as they are: they are what makes an interpreter its environment's.

    Raises:
        UsageError: neither a file that runs nor a command of the PATH.
    """
    if text is None:
        return sys.executable
    found = shutil.which(text)
    if found is None:
        raise UsageError("no such interpreter", file=text, field="--python", fix="a file that runs: venv/bin/python")
    return str(Path(found).absolute())


def answer_stream(as_json: bool) -> TextIO:
    """Where the words of an answer go: standard output, unless a JSON document has that."""
    return sys.stderr if as_json else sys.stdout


def publish(measurement: Measurement, out: Path | None, as_json: bool) -> None:
    """Write the record where it is asked for."""
    if out is not None:
        write(out, measurement)
    if as_json:
        print_json(to_json(measurement))


def print_json(document: Any) -> None:
    """One JSON document on standard output."""
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")
