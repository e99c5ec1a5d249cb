"""The dispatch lock: complete, stable, and red on any change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moegate.dispatch import OPS, PLATFORM_NAMES, ROWS, lock, rows_of
from moegate.errors import UsageError

SHIPPED = Path(__file__).resolve().parents[3] / "kernels" / "dispatch.lock.json"


def test_the_shipped_lock_is_up_to_date() -> None:
    changes = lock.diff(lock.read(SHIPPED), lock.table())
    assert [change.words for change in changes] == [], "run `orchestrator dispatch lock` if this is meant"
    assert lock.family_changes(lock.read(SHIPPED), lock.table()) == ()


def test_the_lock_covers_every_op_platform_and_request() -> None:
    table = lock.table()
    for op in OPS:
        for platform in PLATFORM_NAMES:
            assert lock.requests(table, op, platform) == {"auto", *(row.backend for row in rows_of(op))}


def test_the_text_is_json_and_comes_back() -> None:
    assert json.loads(lock.dumps(lock.table())) == lock.table()


def test_swapped_rows_are_found_with_both_chains(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    lock.write(path)
    rows = list(ROWS)
    at = [i for i, row in enumerate(rows) if row.op == "fused_experts" and row.backend in ("triton", "torch")]
    rows[at[0]], rows[at[1]] = rows[at[1]], rows[at[0]]
    changes = lock.diff(lock.read(path), lock.table(tuple(rows)))
    assert changes
    assert {change.request for change in changes} == {"auto"}
    first = next(change for change in changes if change.platform == "cuda-sm90")
    assert first.words.endswith("triton -> torch")
    assert first.before[-1] == "triton: chosen"
    assert first.after[-1] == "torch: chosen"
    text = path.read_text()
    assert '"bfloat16"' in text.splitlines()[lock.line_of(text, first) - 1]


def test_a_choice_that_became_a_refusal_is_called_one() -> None:
    rows = tuple(row for row in ROWS if row.op != "topk" or row.backend == "intel_xpu")
    changes = lock.diff(lock.table(), lock.table(rows))
    words = [change.words for change in changes if change.request == "auto" and change.platform == "cuda-sm90"]
    assert "topk on cuda-sm90, 64 experts, bare, auto: triton -> refused" in words


def test_what_is_left_out_because_it_answers_the_same_is_no_nothing() -> None:
    before = lock.table()
    after = json.loads(json.dumps(before))
    name = "fp8 [128,128]"
    assert "full" in after["ops"]["fused_experts"]["xpu-bmg"][name]
    del after["ops"]["fused_experts"]["xpu-bmg"][name]["full"]
    words = [change.words for change in lock.diff(before, after) if change.request == "auto"]
    assert words == [f"fused_experts on xpu-bmg, {name}, full, auto: intel_xpu -> torch"]


def test_a_lost_row_is_found(tmp_path: Path) -> None:
    rows = tuple(row for row in ROWS if (row.op, row.backend) != ("block_fp8_linear", "scaled_mm"))
    changes = lock.diff(lock.table(), lock.table(rows))
    assert any(c.request == "scaled_mm" and c.after is None for c in changes)
    assert any(c.request == "auto" and c.platform == "xpu-bmg" and "scaled_mm -> triton" in c.words for c in changes)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2, "ops": {}}', '{"schema": 1, "ops": []}'])
def test_a_damaged_lock_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    path.write_text(text)
    with pytest.raises(UsageError):
        lock.read(path)


def test_an_odd_but_valid_lock_is_compared_without_a_crash(tmp_path: Path) -> None:
    odd = {"schema": 1, "ops": {"fused_experts": {"cpu": {"bfloat16": {"bare": {"auto": []}}}}, "x": 3}}
    assert lock.diff(odd, lock.table())


def test_a_family_that_reads_a_model_differently_is_found() -> None:
    before = lock.table()
    after = json.loads(json.dumps(before))
    name = "DeepseekV3ForCausalLM"
    assert before["families"][name].startswith("E 33 (unfused 32) topk 2 N 96")
    after["families"][name] = after["families"][name].replace("E 33", "E 32")
    del after["families"]["GptOssForCausalLM"]
    assert [change[0] for change in lock.family_changes(before, after)] == [name, "GptOssForCausalLM"]
