# ruff: noqa: E501 - edits read best on one line
"""Matrices that are right: the plan that comes of them."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moegate.errors import UsageError
from moegate.records import Plan, from_json, to_json
from orchestrator.cells import KINDS
from orchestrator.matrix import load
from orchestrator.matrix.schema import json_schema
from orchestrator.plan import build
from orchestrator.plan.warn import warnings

ROOT = Path(__file__).resolve().parents[3]


def planned(path: Path) -> Plan:
    return build(load(path))


def test_a_plan_survives_its_own_record(repository):
    plan = planned(repository / "matrix.yaml")
    assert from_json(Plan, json.loads(json.dumps(to_json(plan)))) == plan


def test_text_is_typed_by_the_schema_and_not_by_yaml(repository, good):
    path = repository / "matrix.yaml"
    path.write_text(
        good.replace(
            "{dockerfile: cpu.Dockerfile}", "{dockerfile: cpu.Dockerfile, args: {TRITON: 3.10, FLAG: no, PORT: 12:30}}"
        )
        .replace("name: demo", 'name: "no"')
        .replace("timeout: 2m", "timeout: 1h30m")
    )
    matrix = load(path)
    assert matrix.spec.images["cpu"].args == {"TRITON": "3.10", "FLAG": "no", "PORT": "12:30"}
    assert matrix.spec.name == "no"
    assert {cell.timeout_s for cell in build(matrix).cells} == {5400.0}


def test_defaults_reach_only_the_kinds_that_take_them(repository, good):
    path = repository / "matrix.yaml"
    path.write_text(
        good.replace("timeout: 2m}", "timeout: 2m, graph: full, effort: quick}").replace("\n    effort: quick", "")
    )
    cells = {cell.kind: cell for cell in planned(path).cells}
    assert cells["tune"].axes["effort"] == "quick"
    assert cells["serve"].axes["graph"] == "full"
    assert "graph" not in cells["tune"].axes


def test_ids_are_stable_and_say_what_makes_a_cell(repository, good):
    first = {cell.label: cell.id for cell in planned(repository / "matrix.yaml").cells}
    path = repository / "other.yaml"
    path.write_text("# a comment\n" + good.replace("timeout: 2m", "timeout: 9m").replace("margin: 1%", "margin: 2%"))
    assert {cell.label: cell.id for cell in planned(path).cells} == first
    path.write_text(good.replace("seed: 1}", "seed: 2}"))
    second = {cell.label: cell.id for cell in planned(path).cells}
    changed = {label for label in first if first[label] != second[label]}
    assert changed == {label for label in first if label.startswith("serve/")}


def test_the_control_is_the_cell_whose_lookup_is_out_of_reach(repository):
    cells = {cell.axes.get("moe_runner_backend"): cell for cell in planned(repository / "matrix.yaml").cells}
    assert cells["auto"].control
    assert cells["auto"].family == "control"
    assert not cells["triton"].control
    assert cells["triton"].family == "serving"
    tune = next(cell for cell in planned(repository / "matrix.yaml").cells if cell.kind == "tune")
    assert cells["triton"].needs == cells["auto"].needs == (tune.id,)


def test_include_and_exclude(repository, good):
    path = repository / "matrix.yaml"
    path.write_text(
        good.replace(
            "[auto, triton]", "[auto, triton]\n    graph: [eager, full]\n    exclude: [{moe_runner_backend: auto, graph: full}]"
            "\n    include: [{moe_runner_backend: torch, graph: eager}]",
        )
    )  # fmt: skip
    points = {(c.axes["moe_runner_backend"], c.axes["graph"]) for c in planned(path).cells if c.kind == "serve"}
    assert points == {("auto", "eager"), ("triton", "eager"), ("triton", "full"), ("torch", "eager")}


def test_aliases_are_read_as_what_they_stand_for(repository, good):
    path = repository / "matrix.yaml"
    path.write_text(
        good.replace("pools: [cpu]", "pools: &p [cpu]").replace("    effort: quick", "    pools: *p\n    effort: quick")
    )
    assert planned(path).cells == planned(repository / "matrix.yaml").cells


def test_residency_is_part_of_a_cell_and_makes_no_further_ones(repository, good):
    path = repository / "matrix.yaml"
    swapped = planned(path)
    assert {cell.axes["residency"] for cell in swapped.cells if cell.kind == "serve"} == {"swap"}
    path.write_text(good.replace("  - kind: serve\n", "  - kind: serve\n    residency: both\n"))
    resident = planned(path)
    assert {cell.axes["residency"] for cell in resident.cells if cell.kind == "serve"} == {"both"}
    assert len(resident.cells) == len(swapped.cells)
    assert resident.warnings == swapped.warnings


def test_only_keeps_what_the_chosen_cells_need(repository):
    matrix = load(repository / "matrix.yaml")
    assert [cell.kind for cell in build(matrix, only=["serve/*/triton/*"]).cells] == ["tune", "serve"]
    with pytest.raises(UsageError, match="no cell matches"):
        build(matrix, only=["nothing"])


def test_a_matrix_that_cannot_find_anything_is_warned_about(repository, good):
    path = repository / "matrix.yaml"
    path.write_text(good.replace("confirm: 8", "confirm: 6"))
    assert any("confirm 6 cannot find anything in 1 serving cells" in text for text in planned(path).warnings)
    path.write_text(good)
    assert not any("cannot find" in text for text in planned(path).warnings)


def test_controls_that_could_not_be_told_are_warned_about():
    plan = planned(ROOT / "matrix.yaml")
    fewer = replace(plan, compare=replace(plan.compare, confirm=6))
    assert any(
        "confirm 6 cannot find anything in 2 control cells at q 0.02: write confirm: 7 or more" in text
        for text in warnings(fewer)
    )
    assert not any("cannot find" in text for text in warnings(plan))


def test_a_budget_counts_a_pools_slots():
    plan = planned(ROOT / "matrices" / "b60.yaml")
    assert not any("for a budget of" in text for text in warnings(plan))
    alone = replace(plan, pools=tuple(replace(pool, slots=1) for pool in plan.pools))
    assert any("for a budget of 2h00m" in text for text in warnings(alone))


def test_a_device_name_that_no_driver_says_is_warned_about():
    plan = planned(ROOT / "matrices" / "b60.yaml")
    assert not any("is called" in text for text in warnings(plan))
    short = replace(plan, pools=tuple(replace(pool, device_name="B60") for pool in plan.pools))
    assert any("pool b60: no device that we know is called B60 (near: Intel(R)_Arc" in text for text in warnings(short))


def test_the_shipped_matrices_plan():
    for path in (ROOT / "matrix.yaml", ROOT / "matrices" / "regression-demo.yaml"):
        plan = planned(path)
        assert plan.cells
        assert all(cell.why for cell in plan.cells)


def test_the_b60_matrix_plans_with_auto_as_control():
    plan = planned(ROOT / "matrices" / "b60.yaml")
    serve = {(c.axes["moe_runner_backend"], c.axes["graph"]): c.control for c in plan.cells if c.kind == "serve"}
    assert serve == {
        ("auto", "eager"): True,
        ("auto", "full"): True,
        ("triton", "eager"): False,
        ("triton", "full"): False,
    }
    assert all(cell.needs for cell in plan.cells if cell.arms)


def test_ten_thousand_cells_plan_in_about_a_second(repository, good):
    path = repository / "matrix.yaml"
    names = [f"cpu{i}" for i in range(3334)]
    pools = "".join(f"  {name}: {{device: cpu, image: cpu, ray: none}}\n" for name in names)
    cell = f"  - kind: kernel-test\n    pools: [{', '.join(names)}]\n    dtypes: [float32, float16, bfloat16]"
    path.write_text(good.replace("models:\n", f"{pools}models:\n", 1).replace("  - kind: check", cell))
    matrix = load(path)
    began = time.process_time()
    plan = build(matrix)
    assert len(plan.cells) == 10_002 + 3
    assert time.process_time() - began < 1.0


def test_the_schema_knows_every_key_of_every_kind():
    schema = json_schema()
    for kind in KINDS.values():
        definition = schema["$defs"][kind.spec.__name__]
        assert set(definition["properties"]) == set(kind.spec.model_fields)
        assert definition["additionalProperties"] is False
    assert set(schema["properties"]) >= {"schema", "name", "pools", "models", "arms", "cells", "compare", "gate"}


def test_the_shipped_matrices_follow_the_schema_that_editors_get():
    jsonschema = pytest.importorskip("jsonschema", reason="comes with the ray extra")
    validator = jsonschema.Draft202012Validator(json_schema())
    for path in (ROOT / "matrix.yaml", *(ROOT / "matrices").glob("*.yaml")):
        assert not [error.message for error in validator.iter_errors(yaml.safe_load(path.read_text()))], path


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_damage_to_a_matrix_causes_anything_but_a_refusal(repository, good, data):
    text = bytearray(good.encode())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text) - 1))
        piece = data.draw(
            st.sampled_from(
                [b"", b":", b"-", b"[", b"{", b"&a ", b"*a", b"!!", b"\t", b"\xff", b"\n", b"'", b"#", b"0"]
            )
        )
        text[at : at + data.draw(st.integers(0, 3))] = piece
    path = repository / "fuzz.yaml"
    path.write_bytes(bytes(text))
    try:
        plan = build(load(path))
    except UsageError:
        return
    assert replace(plan, warnings=()).cells


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_no_bytes_cause_anything_but_a_refusal(repository, data):
    path = repository / "bytes.yaml"
    path.write_bytes(data)
    with pytest.raises(UsageError):
        load(path)
