"""The 2x2 bench: what kernels and decodes foretell for a cell, from the batch sizes of its load."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.gpu.bench_serving import cell, decode_times


def row(arm: str, number: int, tpot: float) -> dict[str, object]:
    numbers = {"median_tpot_ms": tpot, "output_throughput": 1e3 / tpot, "median_ttft_ms": 1.0}
    return {"arm": arm, "backend": "triton", "concurrency": 4, "replicate": number, "void": None, "numbers": numbers,
            "steps": {"4": 90, "1": 10, "512": 50}}  # fmt: skip


ROWS = [row(arm, number, tpot) for number in range(6) for arm, tpot in (("untuned", 1.0), ("tuned", 0.8))]


def test_both_forecasts_weigh_the_decode_steps_alone(tmp_path: Path) -> None:
    file = tmp_path / "arms.json"
    timed = {str(m): {"untuned": {"back to back": [us, us + 2, us - 2]}, "tuned": {"back to back": [us - less] * 3}}
             for m, us, less in ((1, 600.0, 50.0), (4, 900.0, 150.0))}  # fmt: skip
    file.write_text(json.dumps({"sequences": timed}))
    decodes = decode_times(file)
    assert decodes == {1: (600.0, 550.0), 4: (900.0, 750.0)}
    kernels = {1: (30.0, 25.0), 4: (50.0, 40.0), 512: (1000.0, 1.0)}
    found = cell(ROWS, "triton", 4, {"kernels": (kernels, 10), "decodes": (decodes, 1), "nothing": ({}, 1)})
    assert found["median_tpot_ms"]["gain"] == pytest.approx(0.25)
    less = 0.9 * 100 + 0.1 * 50  # ten layers of 10 and of 5 us
    assert found["kernels"] == {"gain": pytest.approx(1000 / (1000 - less) - 1, abs=1e-5), "exact": 1.0}
    less = 0.9 * 150 + 0.1 * 50
    assert found["decodes"]["gain"] == pytest.approx(1000 / (1000 - less) - 1, abs=1e-5)
    assert "nothing" not in found
    assert math.isfinite(found["median_tpot_ms"]["low"])


def test_without_a_file_of_decodes_there_is_no_such_forecast() -> None:
    assert decode_times(None) == {}
