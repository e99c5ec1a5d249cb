"""The types of matrix.yaml: what a text must look like to be a name, a number, a duration or a share.

Each type reads the text as it was written and refuses what YAML or Python would have bent into something else. Every
refusal says what would be right.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from moegate.masking import looks_secret
from moegate.records.plan import LEAST_Q, MOST_PAIRS

__all__ = [
    "Backend",
    "Bool",
    "Count",
    "Duration",
    "Env",
    "EnvName",
    "Futility",
    "GitRef",
    "Line",
    "Many",
    "Metric",
    "Name",
    "Natural",
    "PairCount",
    "PathText",
    "Rate",
    "Share",
    "Whole",
    "fail",
]

NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
_YAML_WORDS = frozenset({"no", "yes", "on", "off", "true", "false", "null", "~", "y", "n"})
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,8})(\.[0-9]{1,12})?(e-?[0-9]{1,2})?")
_DURATION = re.compile(r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# Variables that would change which program or which files a child runs with, or that the orchestrator sets itself.
_RESERVED_ENV = re.compile(r"(PATH|HOME|IFS|ENV|BASH_ENV|SHELLOPTS|TRITON_INTERPRET|(LD|PYTHON|MOEGATE|RAY|DYLD)_?.*)")


def fail(message: str, fix: str) -> PydanticCustomError:
    """Return the error that the loader turns into a UsageError with file and line."""
    return PydanticCustomError("moegate", "{message}", {"message": message, "fix": fix})


def _text(value: Any, what: str, example: str) -> str:
    if not isinstance(value, str):
        kind = "a list" if isinstance(value, list) else "a mapping"
        raise fail(f"is {kind}; must be {what}", f"write {example}")
    return str(value)


def _name(value: Any) -> str:
    text = _text(value, "a name", "a name such as b60")
    if text.lower() in _YAML_WORDS and getattr(value, "bare", False):
        raise fail(f"a bare {text} is a truth value in YAML, not a name", f'quote it: "{text}"')
    if not NAME.fullmatch(text):
        raise fail(
            f"{text[:80]!r} is not a name", "use lower-case letters, digits, _ . - (at most 63), starting with a letter"
        )
    return text


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, int):  # a default of ours
            return value
        text = _text(value, "a whole number", f"a number such as {max(low, 1)}")
        if not _WHOLE.fullmatch(text):
            hint = f"write {text.lstrip('0')}" if re.fullmatch(r"0\d+", text) and text.strip("0") else None
            raise fail(f"{text[:80]!r} is not a whole number", hint or f"write digits only, such as {max(low, 1)}")
        number = int(text)
        if not low <= number <= high:
            raise fail(f"is {number}", f"write a number from {low} to {high}")
        return number

    return read


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = _text(value, "true or false", "true or false")
    if text not in ("true", "false"):
        raise fail(f"{text[:80]!r} is neither true nor false", "write true or false")
    return text == "true"


def _duration(value: Any) -> float:
    if isinstance(value, float):
        return value
    text = _text(value, "a duration", "a duration such as 20m")
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        hint = "write it with its unit, such as 90s, 20m, 2h or 1h30m"
        raise fail(f"{text[:80]!r} is not a duration", hint)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    total = float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if not 0 < total <= 30 * 86400:
        raise fail(f"is {text}", "write a duration from 1s to 30d")
    return total


def _share(value: Any) -> float:
    if isinstance(value, float):
        return value
    text = _text(value, "a share", "a share such as 1%")
    percent = text.endswith("%")
    digits = text[:-1].rstrip() if percent else text
    if not _DECIMAL.fullmatch(digits):
        raise fail(f"{text[:80]!r} is not a share", "write a percentage such as 1% or a fraction such as 0.01")
    share = float(digits) / (100 if percent else 1)
    if not LEAST_Q <= share < 1:
        raise fail(f"is {text}", f"write a share from {LEAST_Q:g} to below 1, such as 1% or 0.01")
    return share


def _rate(value: Any) -> float:
    if isinstance(value, float):
        return value
    text = _text(value, "a number", "a number such as 4.0")
    if not _DECIMAL.fullmatch(text) or not 0 < float(text) <= 1e6:
        raise fail(f"{text[:80]!r} is not a rate", "write requests per second, such as 4.0")
    return float(text)


def _line(value: Any) -> str:
    text = _text(value, "a text", "one line of text")
    if not text or len(text) > 1024 or _CONTROL.search(text):
        raise fail("must be one line of 1 to 1024 printable characters", "remove control characters and line breaks")
    return text


def _path(value: Any) -> str:
    text = _line(value)
    if text.startswith("-"):
        raise fail(f"{text[:80]!r} looks like an option, not a path", f"write ./{text[:80]}")
    return text


def _pattern(what: str, pattern: str, example: str) -> Callable[[Any], str]:
    regex = re.compile(pattern)

    def read(value: Any) -> str:
        text = _text(value, what, example)
        if not regex.fullmatch(text):
            raise fail(f"{text[:80]!r} is not {what}", f"write {example}")
        return text

    return read


def _env_name(value: Any) -> str:
    text = _pattern("a variable's name", r"[A-Za-z_][A-Za-z0-9_]{0,127}", "a name such as TRITON_CACHE_DIR")(value)
    if _RESERVED_ENV.fullmatch(text):
        raise fail(f"{text} may not be set from a matrix", "leave it out; it decides which program or files are used")
    return text


def _no_secret(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if looks_secret(name, value):
            hint = "leave it out: a matrix, its plan and its report are public, and launches have no network"
            raise fail(f"{name} looks like a secret", hint)
    return values


def _futility(value: Any) -> int | None:
    if value is None or value == "none":
        return None
    return _whole(1, MOST_PAIRS)(value)


def _many(value: Any) -> Any:
    """One value stands for a list of one."""
    if isinstance(value, list):
        if not value:
            raise fail("is an empty list", "name at least one value, or remove the key")
        seen: set[str] = set()
        for item in value:
            if isinstance(item, str) and item in seen:
                raise fail(f"lists {str(item)[:80]!r} twice", "keep one")
            seen.update([item] if isinstance(item, str) else ())
        return value
    return [value]


T = TypeVar("T")

Name = Annotated[str, BeforeValidator(_name, json_schema_input_type=str)]
Natural = Annotated[int, BeforeValidator(_whole(1, 1_000_000), json_schema_input_type=int)]
PairCount = Annotated[int, BeforeValidator(_whole(1, MOST_PAIRS), json_schema_input_type=int)]
Count = Annotated[int, BeforeValidator(_whole(1, 1024), json_schema_input_type=int)]
Whole = Annotated[int, BeforeValidator(_whole(0, 2**53), json_schema_input_type=int)]
Bool = Annotated[bool, BeforeValidator(_bool, json_schema_input_type=bool)]
Duration = Annotated[float, BeforeValidator(_duration, json_schema_input_type=str)]
Share = Annotated[float, BeforeValidator(_share, json_schema_input_type=str | float)]
Rate = Annotated[float, BeforeValidator(_rate, json_schema_input_type=float)]
Line = Annotated[str, BeforeValidator(_line, json_schema_input_type=str | float)]
PathText = Annotated[str, BeforeValidator(_path, json_schema_input_type=str)]
EnvName = Annotated[str, BeforeValidator(_env_name, json_schema_input_type=str)]
Env = Annotated[dict[EnvName, Line], AfterValidator(_no_secret)]
Futility = Annotated[int | None, BeforeValidator(_futility, json_schema_input_type=str | int)]
Metric = Annotated[
    str,
    BeforeValidator(_pattern("a metric", r"[a-z][a-z0-9_]{0,62}", "a metric such as output_throughput")),
]
Backend = Annotated[
    str,
    BeforeValidator(_pattern("a backend", r"[a-z][a-z0-9_]{0,40}", "auto, triton or another name of the engine")),
]
GitRef = Annotated[
    str,
    BeforeValidator(_pattern("a git ref", r"(?!-)(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9_./@^~-]{0,200}", "a branch or a SHA")),
]
Many = Annotated[list[T], BeforeValidator(_many)]
