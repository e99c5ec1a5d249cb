"""Every case runs with uninitialised memory filled, with NaN where the type has one: nothing unwritten passes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils import deterministic


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Filling comes with torch's deterministic mode, which warns of operations that the twins use on a GPU.
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:.*determinis.*"))


@pytest.fixture(autouse=True)
def _filled_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", True)
    torch.set_deterministic_debug_mode("warn")
    yield
    torch.set_deterministic_debug_mode(before)
