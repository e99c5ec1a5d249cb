"""Results of other clients, in the forms that they write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moegate.errors import UsageError
from serving.load.importers import import_result

SHARED = {
    "duration": 3.5,
    "completed": 40,
    "total_input_tokens": 640,
    "total_output_tokens": 1280,
    "mean_ttft_ms": 71.0,
    "request_throughput": 11.1,
    "output_throughput": 365.0,
    "mean_tpot_ms": 8.9,
    "median_tpot_ms": 5.2,
    "p99_itl_ms": 70.0,
}
SGLANG = {
    **SHARED,
    "tag": None,
    "backend": "sglang-oai",
    "sharegpt_output_len": None,
    "total_output_tokens_retokenized": 1279,
    "total_throughput": 548.0,
    "median_e2e_latency_ms": 233.0,
    "concurrency": 3.9,
    "server_info": {},
}
VLLM = {
    **SHARED,
    "date": "20260101",
    "endpoint_type": "openai",
    "total_token_throughput": 548.0,
    "median_e2el_ms": 233.0,
    "p99_ttft_ms": float("nan"),
}


def test_sglang_appends_lines_and_the_last_counts(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(json.dumps({**SGLANG, "completed": 1}) + "\n" + json.dumps(SGLANG) + "\n")
    got = import_result(file)
    assert (got.client, got.completed) == ("sglang.bench_serving", 40)
    assert got.numbers["median_e2e_latency_ms"] == 233.0
    assert got.numbers["total_throughput"] == 548.0
    assert "output tokens - 1" in got.tpot


def test_vllm_writes_one_object_and_calls_latency_e2el(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps({**VLLM, "p99_ttft_ms": None}, indent=2))
    got = import_result(file)
    assert got.client == "vllm bench serve"
    assert got.numbers["median_e2e_latency_ms"] == 233.0
    assert got.numbers["total_throughput"] == 548.0
    assert "p99_ttft_ms" not in got.numbers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("{", "not JSON"),
        ("[1]", "no object"),
        ('{"completed": 3}', "no result of a client that is known"),
        (json.dumps({**SGLANG, "completed": 0}), "no request completed"),
        (json.dumps(VLLM), "NaN"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UsageError, match=words):
        import_result(tmp_path / "r.json")
