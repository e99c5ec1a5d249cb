"""Cut text to size, and make numbers readable.

Everything that a report prints and that others wrote goes through `moegate.text.clean` first. Escaping for the format
(HTML, XML, Markdown) comes after it and is the writer's own job.
"""

from __future__ import annotations

import math
import re
import unicodedata

from moegate.text import clean

__all__ = [
    "clip",
    "count",
    "duration",
    "number",
    "one_line",
    "percent",
    "points",
    "slug",
    "tail",
    "value",
]

MINUS, DASH, TIMES = "\N{MINUS SIGN}", "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
_SLUG = re.compile(r"[^a-zA-Z0-9_.-]+")


def clip(text: str, limit: int) -> str:
    """Return at most `limit` characters, with an ellipsis where something was cut off."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)].rstrip() + "…"


def one_line(text: str, limit: int = 200) -> str:
    """Return cleaned text on one line, at most `limit` characters."""
    return clip(" ".join(clean(text[: 8 * limit]).split()), limit)


def tail(text: str, limit: int, width: int = 400) -> str:
    """Return the end of a log: whole lines of at most `width` characters, at most `limit` characters together."""
    raw = text[-16 * max(limit, 1) :]
    lines = clean(raw).split("\n")
    if len(raw) < len(text):
        lines = lines[1:] or lines
    kept: list[str] = []
    room = limit
    for line in reversed(lines):
        short = clip(line, width)
        room -= len(short) + 1
        if room < 0 and kept:
            return "\n".join(["…", *reversed(kept)])
        kept.append(short)
    return "\n".join(reversed(kept)).strip("\n")


def slug(text: str) -> str:
    """Return `text` as an anchor or file name: letters, digits, `_`, `.` and `-` only."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return _SLUG.sub("-", plain).strip("-") or "x"


def percent(fraction: float | None, digits: int = 1, *, sign: bool = True) -> str:
    """Write a fraction as percent: 0.052 -> `+5.2 %`; None -> an en dash. Factors of 10 and more become `x12.3`."""
    if fraction is None or not math.isfinite(fraction):
        return DASH
    if fraction >= 9:
        return f"{TIMES}{fraction + 1:.1f}" if fraction < 1e6 else f"{TIMES}{fraction:.1e}"
    text = f"{abs(fraction) * 100:.{digits}f}"
    if float(text) == 0:
        return f"{text} %"
    mark = MINUS if fraction < 0 else "+" if sign else ""
    return f"{mark}{text} %"


def points(fraction: float) -> str:
    """Write a difference of two fractions in points: 0.012 -> `+1.20 points`."""
    text = f"{abs(fraction) * 100:.2f}"
    return f"{'' if float(text) == 0 else MINUS if fraction < 0 else '+'}{text} points"


def value(number_: float | None, unit: str = "") -> str:
    """Write a measured value with four significant digits and its unit."""
    if number_ is None or not math.isfinite(number_):
        return DASH
    text = number(number_)
    return f"{text} {unit}".rstrip()


def number(number_: float) -> str:
    """Write a number with about four significant digits and thin spaces between thousands; far ones with a power."""
    if number_ == 0:
        return "0"
    size = abs(number_)
    if not 1e-6 <= size < 1e15:
        return (MINUS if number_ < 0 else "") + f"{size:.3e}"
    digits = max(0, 3 - math.floor(math.log10(size))) if size < 1000 else 0
    text = f"{size:,.{min(digits, 6)}f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    return (MINUS if number_ < 0 else "") + text


def count(n: int, word: str, plural: str | None = None) -> str:
    """Write a count with its noun: `1 cell`, `3 cells`."""
    noun = word if n == 1 else plural or word + "s"
    return f"{n:,} {noun}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def duration(seconds: float | None) -> str:
    """Write seconds for a person: `850 ms`, `12.3 s`, `4 min 05 s`, `2 h 10 min`."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    if abs(seconds) >= 1e9:
        return f"{number(seconds)} s"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
