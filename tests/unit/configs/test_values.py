"""Values of config files: the table of fields, the strict reader, lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moegate.configs import load_config, nearest, parse_config
from moegate.configs.positions import Positions, line_of
from moegate.configs.values import DENSE_FIELDS, problems
from moegate.errors import UsageError

GOOD = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}


def rules(data: object, **kwargs: object) -> set[tuple[str, tuple[str, ...]]]:
    return {(p.rule, p.path) for p in problems(data, **kwargs)}  # type: ignore[arg-type]


def test_a_good_file_has_no_problem() -> None:
    assert rules({"1": GOOD, "16": {**GOOD, "USE_TMA": True}}) == set()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("BLOCK_SIZE_M", 0),
        ("BLOCK_SIZE_M", -16),
        ("BLOCK_SIZE_M", 17),
        ("BLOCK_SIZE_N", "64"),
        ("BLOCK_SIZE_K", 64.0),
        ("BLOCK_SIZE_K", None),
        ("BLOCK_SIZE_M", True),
        ("BLOCK_SIZE_M", 2048),
        ("GROUP_SIZE_M", 0),
        ("num_warps", 3),
        ("num_warps", 64),
        ("num_stages", 0),
        ("num_stages", [3]),
        ("USE_TMA", 1),
        ("USE_TMA", "true"),
        ("BLOCK_SIZE_M", 8),
        ("BLOCK_SIZE_M", 10**30),
    ],
)
def test_a_value_that_cannot_be_launched(field: str, value: object) -> None:
    assert ("bad-value", ("16", field)) in rules({"16": {**GOOD, field: value}})


@pytest.mark.parametrize("key", ["0", "-1", "016", " 16", "1_6", "1.0", "", "x", "triton_version", "\u0661"])
def test_a_key_that_is_no_batch_size(key: str) -> None:
    assert ("bad-value", (key,)) in rules({key: GOOD})


@pytest.mark.parametrize("data", [None, [], 3, "x", {}, {"1": []}, {"1": None}])
def test_a_document_that_is_no_config(data: object) -> None:
    assert any(rule == "bad-value" for rule, _ in rules(data))


def test_engines_and_vendors_know_different_fields() -> None:
    assert rules({"triton_version": "3.4.0", "1": GOOD}, engine="vllm") == set()
    assert rules({"1": {**GOOD, "SPLIT_K": 1}}, engine="vllm") == set()
    assert rules({"1": {**GOOD, "SPLIT_K": 1}}, engine="sglang") == {("unknown-field", ("1", "SPLIT_K"))}
    assert rules({"1": {**GOOD, "kpack": 2}}, vendor="amd") == set()
    assert rules({"1": {**GOOD, "kpack": 2}}, vendor="nvidia") == {("unknown-field", ("1", "kpack"))}
    assert rules({"1": {**GOOD, "BLOCK_SIZE_M": 8}}, engine="vllm") == set()
    single = {"1": {**GOOD, "BLOCK_SIZE_M": 1}}
    assert rules(single) == set()
    assert rules(single, engine="sglang") == set()
    for others in ({"engine": "vllm"}, {"fields": DENSE_FIELDS}):
        assert rules(single, **others) == {("bad-value", ("1", "BLOCK_SIZE_M"))}
    assert "from 16 to 1024, or 1" in next(problems({"1": {**GOOD, "BLOCK_SIZE_M": 2}})).message


def test_missing_and_unsorted() -> None:
    entry = {k: v for k, v in GOOD.items() if k != "num_warps"}
    assert rules({"1": entry}) == {("missing-field", ("1",))}
    assert "the compiler's default applies" in next(problems({"1": entry})).message
    tile = {k: v for k, v in GOOD.items() if k != "BLOCK_SIZE_N"}
    assert next(problems({"1": tile})).message == "batch size 1 has no BLOCK_SIZE_N: nothing can be launched"
    assert rules({"16": GOOD, "1": GOOD}) == {("unsorted-keys", ("1",))}


def test_the_nearest_batch_size_and_the_first_on_ties() -> None:
    configs = {24: GOOD, 32: GOOD}
    assert [nearest(configs, m) for m in (1, 27, 28, 29, 4096)] == [24, 24, 24, 32, 32]
    assert nearest({32: GOOD, 24: GOOD}, 28) == 32


def test_the_reader_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"1": GOOD, "2": {**GOOD, "num_warps": "4"}}, indent=4))
    with pytest.raises(UsageError, match="num_warps at batch size 2") as caught:
        load_config(path)
    assert path.read_text().splitlines()[caught.value.line - 1].strip().startswith('"num_warps": "4"')
    assert list(parse_config(json.dumps({"16": GOOD, "2": GOOD}))) == [16, 2]


def test_lines_of_keys_and_of_repeated_keys() -> None:
    text = '{\n "1": {\n  "a": 1,\n  "a": 2\n },\n "2": {"b": [ {"a": 3} ]}\n}'
    positions = Positions(text)
    assert line_of(text, ("1", "a")) == 4
    assert positions.duplicates == [(("1", "a"), 4)]
    assert line_of(text, ("2", "b")) == 6
    assert line_of(text, ("2", "nothing")) == 6
    assert line_of("not json {", ("1",)) == 1
