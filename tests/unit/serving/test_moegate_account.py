"""What the report is told of a server whose experts are spread out."""

from __future__ import annotations

from serving.engines.moegate import _spread


def test_grids_of_waiting_kernels_reach_the_environment() -> None:
    grid = {"kernel": "ep_route", "dtype": "bfloat16", "wanted": 228, "resident": 132, "blocks": 132}
    told = {"size": 2, "mode": "fast", "wire": "bfloat16", "grids": [grid]}
    assert _spread(told) == {
        "expert_parallel": "2 ranks, fast, bfloat16 on the wire; "
        "ep_route bfloat16: grid 132 of 228 wanted, 132 resident"
    }
    assert _spread(None) == {}
