"""Text that others wrote, made harmless: labels, model ids, branch names and logs come from whoever is being measured.

`plain` is for a line on a terminal, `clean` for a document that escapes for its own format afterwards, and
`workflow_command` for GitHub Actions, which obeys what a step prints.
"""

from __future__ import annotations

import re

__all__ = ["MOST_ANNOTATIONS", "clean", "plain", "workflow_command"]

MOST_ANNOTATIONS = 10
"""Errors, and as many warnings, that GitHub shows for one step; it drops the rest."""

_ESCAPE_SEQUENCES = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement
    "|(?:\x1b[\\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]{0,999}(?:\x07|\x1b\\\\|\x9c)?"  # OSC, DCS and their kin
    "|\x1b[ -/]*[0-~]?"
)
# Bidirectional controls and invisible joiners reorder or hide what a person reads; line separators break scripts.
_INVISIBLE = re.compile("[\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NOT_TEXT = re.compile("[\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_MOST_PROPERTY, _MOST_MESSAGE = 200, 600


def plain(text: str) -> str:
    """Return `text` as one line for a terminal or a log: what is not printable is written out (`\\x1b`, `\\n`)."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def clean(text: str) -> str:
    """Return `text` without escape sequences, control, bidirectional or invisible characters and lone surrogates.

    Newlines and tabs stay; CR LF and lone CR become newlines; what is no character becomes U+FFFD.
    """
    if text.isascii() and text.isprintable():
        return text
    text = _ESCAPE_SEQUENCES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROLS.sub("", text)
    if text.isascii():
        return text
    return _NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", _INVISIBLE.sub("", text))


def workflow_command(level: str, message: str, **properties: str) -> str:
    """Return the line that makes GitHub Actions show `message` as an annotation; empty properties are left out.

    level: `error`, `warning` or `notice`. No text can end the command, open another, or use the older `##[...]` form.
    """
    fields = ",".join(
        f"{name}={_data(shown, _MOST_PROPERTY).replace(':', '%3A').replace(',', '%2C')}"
        for name, shown in properties.items()
        if shown
    )
    return f"::{level} {fields}::{_data(message, _MOST_MESSAGE)}"


def _data(text: str, most: int) -> str:
    line = " ".join(clean(text[: 8 * most]).split())
    line = line if len(line) <= most else line[: most - 1] + "…"
    return line.replace("##[", "# #[").replace("%", "%25")
