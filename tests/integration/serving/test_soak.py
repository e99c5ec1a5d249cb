"""A short soak; the long one is `serving launch .. -- python -m serving.load.soak --seconds 1800`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.load.soak import Outcome

MODEL = Path("examples/models/tiny-moe").resolve()


def test_unfriendly_clients_harm_nobody(serving: Callable, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "serving.load.soak", "--seconds=6", "--concurrency=8"]
    done = serving("launch", f"--model={MODEL}", "--configs=none", "--", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["faults"] == []
    assert set(found["requests"]) == {"stream", "whole", "vanish", "malformed", "oversized", "silent", "announced"}
    assert sum(found["requests"].values()) > 10, "on however busy a machine"
    assert abs(found["memory_growth"]) < 0.05


def test_growth_is_the_last_quarter_over_the_second() -> None:
    assert Outcome(memory=[50, 60, 100, 100, 100, 100, 110, 112]).growth == pytest.approx(0.11)
    assert Outcome(memory=[100, 100]).growth == 0.0
