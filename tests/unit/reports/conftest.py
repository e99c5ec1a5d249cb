"""The runs that reports are made from in tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moegate.records import RunBundle
from tests.unit.reports.runs import make_green, make_many, make_red


@pytest.fixture(scope="session")
def green() -> RunBundle:
    """A passing run on a CPU."""
    return make_green()


@pytest.fixture(scope="session")
def red() -> RunBundle:
    """A failing run with every outcome."""
    return make_red()


@pytest.fixture(scope="session")
def hostile() -> Callable[[str], RunBundle]:
    """Make the failing run with a text planted in every field that can carry one."""
    return make_red


@pytest.fixture(scope="session")
def many() -> Callable[[int], RunBundle]:
    """Make a run of so many cells."""
    return make_many
