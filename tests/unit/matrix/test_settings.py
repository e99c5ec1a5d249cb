"""`--set`: one value of a matrix replaced on the command line, checked as if it were written."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegate.errors import UsageError
from orchestrator.matrix import load
from orchestrator.plan import build

B60 = Path("matrices/b60.yaml").resolve()


def test_values_are_replaced_and_the_plan_says_so() -> None:
    settings = ("cells[2].load.requests=8", "compare.confirm=10", "gate.required=[serve/*]")
    plan = build(load(B60, settings))
    serve = [cell for cell in plan.cells if cell.kind == "serve"]
    assert [cell.axes["load"]["requests"] for cell in serve] == [8] * 4
    assert plan.compare is not None
    assert (plan.compare.confirm, plan.gate.required) == (10, ("serve/*",))
    assert plan.warnings[:3] == tuple(f"not as b60.yaml says: {setting}" for setting in settings)
    assert plan.matrix_digest != build(load(B60)).matrix_digest


def test_ids_are_those_of_the_file_where_no_axis_changes() -> None:
    small, whole = build(load(B60, ("compare.confirm=10",))), build(load(B60))
    assert [cell.id for cell in small.cells] == [cell.id for cell in whole.cells]


def test_an_alias_elsewhere_keeps_what_it_holds(tmp_path: Path) -> None:
    matrix = tmp_path / "m.yaml"
    matrix.write_text("schema: 1\nname: a\ncells:\n  - &c {kind: check, timeout: 5s}\n  - *c\n")
    first, second = load(matrix, ("cells[0].timeout=9s",)).spec.cells
    assert (first.timeout, second.timeout) == (9.0, 5.0)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("compare.confirm", "is not PLACE=VALUE"),
        ("=3", "is not PLACE=VALUE"),
        ("cells[-1].x=3", "is not PLACE=VALUE"),
        ("cells[9].timeout=3s", "there is no cells"),
        ("compare.confirm.x=3", "there is no compare.confirm.x"),
        ("compare.confirm=", "has no value"),
        ("gate.required=[a", "is not YAML"),
        ("gate.required=!!python/name:os.system x", "has the tag"),
        ("compare.confirm=no", "is not a whole number"),
        ("compare.confrim=3", "did you mean confirm"),
        ("cells[2].load=[{requests: 1}]", "is missing"),
        ("name=\udcff", "is not UTF-8"),
        ("na\udcffme=x", "is not UTF-8"),
    ],
)
def test_a_wrong_setting_is_a_usage_error(setting: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(load(B60, (setting,)))
    assert words in f"{caught.value} (fix: {caught.value.fix})"


def test_what_is_wrong_inside_a_value_is_said_with_the_line_of_its_place() -> None:
    with pytest.raises(UsageError, match="is missing") as caught:
        load(B60, ("cells[2].load={requests: 1}",))
    assert caught.value.line == load(B60).line(("cells", 2, "load"))
    assert caught.value.line > 1


def test_a_key_of_another_kind_is_answered_with_the_keys_of_this_one() -> None:
    with pytest.raises(UsageError, match="unknown key") as caught:
        load(B60, ("cells[0]={kind: check, load: {requests: 1}}",))
    assert caught.value.fix is not None
    assert "load" not in caught.value.fix
