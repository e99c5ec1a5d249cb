"""Each operator against its twin: where the cases run, and on what memory.

`test_interpreted.py` runs them in a child under Triton's interpreter. On a GPU `pytest -m gpu` runs them, each with the
marker `gpu`; where there is none a file is skipped as a whole. Every other run leaves them alone and imports nothing.

Every case runs with uninitialised memory filled, with NaN where the type has one: nothing unwritten passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

PATTERN = "case_*.py"
NO_GPU = "needs a GPU and its torch; test_interpreted.py runs these cases under Triton's interpreter"


class CaseFile(pytest.Module):
    """A file of cases."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        # Filling comes with torch's deterministic mode, which warns of operations that the twins use on a GPU.
        self.add_marker(pytest.mark.filterwarnings("ignore:.*determinis.*"))
        self.add_marker(pytest.mark.gpu)
        if for_gpu(self.config) and not self.config.option.collectonly and not has_gpu():
            pytest.skip(NO_GPU, allow_module_level=True)
        return super().collect()


def for_gpu(config: pytest.Config) -> bool:
    """Whether `-m` asks for what needs a GPU."""
    return re.search(r"(?<!not )\bgpu\b", config.option.markexpr) is not None


def has_gpu() -> bool:
    from xkernels.device import live

    return live().kind != "cpu"


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    named = any(file_path.match(pattern) for pattern in parent.config.getini("python_files"))  # by `-o python_files`
    if named or not file_path.match(PATTERN) or not for_gpu(parent.config):
        return None
    return CaseFile.from_parent(parent, path=file_path)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return CaseFile.from_parent(parent, path=module_path) if module_path.match(PATTERN) else None


@pytest.fixture(autouse=True)
def _filled_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch
    from torch.utils import deterministic

    before = torch.get_deterministic_debug_mode()
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", True)
    torch.set_deterministic_debug_mode("warn")
    yield
    torch.set_deterministic_debug_mode(before)
