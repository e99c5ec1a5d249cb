"""Numbers that a person sets in the environment for a test."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

__all__ = ["number"]

Number = TypeVar("Number", int, float)


def number(name: str, default: Number, least: Number) -> Number:
    """The variable `name` as a number of `default`'s kind, at least `least`; without it, `default`.

    For a test module to read as it is imported: anything else is that module's error at collection, in these words
    alone, and no test runs.
    """
    text = os.environ.get(name)
    if not text:
        return default
    kind = "a whole number" if isinstance(default, int) else "a number"
    try:
        value = type(default)(text)
    except ValueError:
        value = None
    if value is None or not least <= value < float("inf"):
        raise pytest.Collector.CollectError(f"{name} is {text!r}; must be {kind}, at least {least}")
    return value
