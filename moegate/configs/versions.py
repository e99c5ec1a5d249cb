"""Triton versions and the directories that are named after them.

`triton_3_8_0` holds configs timed under Triton 3.8.0. Vendors' builds carry suffixes (`3.8.0+git4cff872c.rocm10.0.0`,
`3.8.0+xpu`): the numbers are compared as numbers, the suffix only breaks ties.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moegate.errors import UsageError

_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?([+.a-z-][A-Za-z0-9.+_-]*)?")
_DIRECTORY = re.compile(r"triton_(\d{1,6})_(\d{1,6})(?:_(\d{1,6}))?([+_a-z-][A-Za-z0-9.+_-]*)?")


@dataclass(frozen=True, order=True)
class Version:
    """A Triton version: three numbers and whatever a vendor appended."""

    numbers: tuple[int, int, int]
    suffix: str = ""

    def __str__(self) -> str:
        """As written in a config directory's name, with dots."""
        return ".".join(map(str, self.numbers)) + self.suffix


def parse_version(text: str) -> Version:
    """Read a version such as `3.8.0` or `3.8.0+git4cff872c`; UsageError where it is none."""
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no Triton version", field="triton", fix="write it as 3.8.0")
    return Version((int(match[1]), int(match[2]), int(match[3] or 0)), match[4] or "")


def parse_directory(name: str) -> Version | None:
    """The version that a `triton_X_Y_Z` directory is named after, or None."""
    match = _DIRECTORY.fullmatch(name)
    return None if match is None else Version((int(match[1]), int(match[2]), int(match[3] or 0)), match[4] or "")


def directory_name(version: str) -> str:
    """The directory for configs of `version` (`3.8.0+xpu` -> `triton_3_8_0`)."""
    return "triton_" + "_".join(map(str, parse_version(version).numbers))


def search_order(directories: list[str], triton: str) -> list[tuple[str, str]]:
    """Directories in moegate's order with the reason that a file found there gets.

    Exact, then older ones newest first, then newer ones oldest first. Names that are no version come nowhere.
    """
    want = parse_version(triton)
    found = [(version, name) for name in directories if (version := parse_directory(name)) is not None]
    exact = sorted(((v.suffix != want.suffix, v.suffix, name) for v, name in found if v.numbers == want.numbers))
    older = sorted((item for item in found if item[0].numbers < want.numbers), key=lambda item: item[0], reverse=True)
    newer = sorted(item for item in found if item[0].numbers > want.numbers)
    return (
        [(name, "exact") for _, _, name in exact]
        + [(name, "older-triton") for _, name in older]
        + [(name, "newer-triton") for _, name in newer]
    )
