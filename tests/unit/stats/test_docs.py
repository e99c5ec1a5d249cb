"""docs/statistics.md says what the code does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from moegate.records import ComparePolicy, GatePolicy
from moegate.stats import Rules, accuracy_non_inferiority, clopper_pearson, pairs_to_detect
from orchestrator.compare import TAIL_FLOORS

PAGE = (Path(__file__).parents[3] / "docs" / "statistics.md").read_text(encoding="utf-8")


def test_the_table_of_defaults() -> None:
    rows = re.findall(r"^\| [^|]+ \| ([\d.]+) \| `(compare|gate)\.(\w+)` \|$", PAGE, re.MULTILINE)
    documented = {name: float(value) for value, _, name in rows}
    assert documented == {field.name: field.default for field in fields(Rules)}
    policies = {"compare": ComparePolicy("a", "b"), "gate": GatePolicy()}
    for value, section, name in rows:
        assert getattr(policies[section], name) == float(value)


def test_the_figures_that_follow_from_arithmetic() -> None:
    assert f"{pairs_to_detect(0.01, 300)} fresh pairs" in PAGE.replace("\n", " ")
    assert f"{TAIL_FLOORS['p99']} requests per arm (p90: {TAIL_FLOORS['p90']})" in PAGE
    assert f"{100 * clopper_pearson(0, 400).high:.2f} % per run" in PAGE
    for samples, verdict in ((538, "inconclusive"), (539, "equivalent")):
        same = {str(i): 1.0 for i in range(samples)}
        assert accuracy_non_inferiority(same, same).verdict == verdict
    assert "539 samples" in PAGE
