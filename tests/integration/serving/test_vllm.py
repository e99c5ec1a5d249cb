"""The vLLM engine file and our load client against a real vLLM on the CPU (`make test-vllm`).

One server, and eight loads on it in turn (MOEGATE_VLLM_ROUNDS: so many times eight), ours and those of vLLM's own
client in ABBA order, so that a drift of the machine falls on both. Both clients are closed loops of the same shape.
Their TPOTs have to agree within 3 %, or, where a machine is too noisy to tell, within the interval of the difference.
One request at a time, because with more the answer depends on how soon a client sends the next one: a prefill that
falls between the tokens of others lengthens their TPOT, one that meets another does not.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from moegate.records import Measurement, read
from moegate.stats import hodges_lehmann, interval
from serving.load.importers import import_result

PYTHON = os.environ.get("MOEGATE_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON, reason="needs a vLLM in an environment of its own: make test-vllm builds it"),
]
ROOT = Path(__file__).resolve().parents[3]
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 512,
    "norm_topk_prob": True, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "torch_dtype": "float32",
    "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
CONCURRENCY = int(os.environ.get("MOEGATE_VLLM_CONCURRENCY", "1"))
REQUESTS, INPUT, OUTPUT = 8 * CONCURRENCY, 32, 128
ORDER = "ABBAABBA" * int(os.environ.get("MOEGATE_VLLM_ROUNDS", "1"))  # A: ours, B: theirs
RESULT = os.environ.get("MOEGATE_VLLM_RESULT")  # where the comparison is kept
ASK = """
import json, os, urllib.request
key = {"Authorization": "Bearer " + os.environ["MOEGATE_API_KEY"]}
asked = urllib.request.Request(os.environ["MOEGATE_BASE_URL"] + "/v1/models", headers=key)
print(json.load(urllib.request.urlopen(asked))["data"][0]["id"])
"""


RECORD = ROOT / "tests" / "unit" / "serving" / "flags"


def test_the_record_of_its_flags_is_what_it_says(tmp_path: Path) -> None:
    wanted = json.loads((RECORD / "vllm.json").read_text())
    argv = [PYTHON, "-P", str(RECORD / "record.py"), "vllm", str(tmp_path / "now.json"), *wanted["flags"]]
    subprocess.run(argv, check=True, capture_output=True, timeout=300)
    assert json.loads((tmp_path / "now.json").read_text()) == wanted


def ours(out: Path) -> str:
    words = [PYTHON, "-P", "-m", "serving", "bench", f"--requests={REQUESTS}", f"--concurrency={CONCURRENCY}",
             f"--input={INPUT}", f"--output={OUTPUT}", f"--out={out}", "--max-lag=1000"]  # fmt: skip
    return shlex.join(words)


def theirs(out: Path) -> str:
    words = [PYTHON, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai", "--endpoint",
             "/v1/completions", "--dataset-name", "random", "--random-input-len", INPUT, "--random-output-len", OUTPUT,
             "--num-prompts", REQUESTS, "--max-concurrency", CONCURRENCY, "--num-warmups", CONCURRENCY, "--ignore-eos",
             "--save-result", "--result-dir", out.parent, "--result-filename", out.name,
             "--percentile-metrics", "ttft,tpot,itl,e2el"]  # fmt: skip
    return shlex.join(map(str, words)) + ' --base-url "$MOEGATE_BASE_URL" --model "$MODEL" --tokenizer "$MODEL"'


def test_client_and_engine_against_a_real_vllm(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    # The first load is only there to warm everything up.
    outs = [tmp_path / f"{index}.json" for index in range(len(ORDER))]
    loads = [ours(tmp_path / "warm.json")]
    loads += [ours(out) if client == "A" else theirs(out) for client, out in zip(ORDER, outs, strict=True)]
    script = " && ".join([f"MODEL=$({shlex.quote(PYTHON)} -c {shlex.quote(ASK)})", *loads])
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "MOEGATE"))},
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    argv = [PYTHON, "-P", "-m", "serving", "launch", "--engine=vllm", f"--model={tmp_path / 'model'}", "--slots=8",
            "--length=512", "--configs=none", "--", "sh", "-c", script]  # fmt: skip
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr[-3000:]

    tpots = [_checked(read(Measurement, out)) if client == "A" else _theirs(out)
             for client, out in zip(ORDER, outs, strict=True)]  # fmt: skip
    found = compared(tpots)
    print(f"\n{json.dumps(found)}")
    if RESULT:
        Path(RESULT).write_text(json.dumps(found, indent=1) + "\n")
    half = (found["high"] - found["low"]) / 2
    assert abs(found["difference"]) <= max(0.03, half), found


def compared(tpots: list[float]) -> dict[str, Any]:
    """Our TPOT against theirs over neighbours in time: the relative difference with its signed-rank interval."""
    pairs = [(tpots[at], tpots[at + 1])[:: 1 if ORDER[at] == "A" else -1] for at in range(0, len(tpots), 2)]
    logs = [math.log(mine / other) for mine, other in pairs]
    bounds = interval(logs)
    return {
        "name": "client-against-vllm-bench-serve", "schema": 1, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{os.cpu_count()} cores", "load_average": [round(value, 2) for value in os.getloadavg()],
        "command": "make test-vllm", "requests": REQUESTS, "concurrency": CONCURRENCY, "input": INPUT, "output": OUTPUT,
        "ours_ms": [round(mine, 3) for mine, _ in pairs], "theirs_ms": [round(other, 3) for _, other in pairs],
        "difference": round(math.expm1(float(hodges_lehmann(logs))), 5), "low": round(math.expm1(bounds.low), 5),
        "high": round(math.expm1(bounds.high), 5), "level": round(bounds.level, 4),
    }  # fmt: skip


def _theirs(out: Path) -> float:
    their = import_result(out)
    assert their.completed == REQUESTS
    return their.numbers["mean_tpot_ms"]


def _checked(measured: Measurement) -> float:
    """Our client's TPOT, after a look at everything else that its record has to say."""
    (launch,) = measured.launches
    assert launch.void_reason is None
    assert launch.detail["total_output_tokens"] == REQUESTS * OUTPUT
    assert launch.proof is not None
    assert (launch.proof.engine, launch.proof.requested_backend) == ("vllm", "auto")
    assert launch.proof.resolved_backend == "cpu"
    assert measured.environment["vllm"].startswith("0.32")
    assert launch.device.kind == "cpu"
    return float(launch.detail["mean_tpot_ms"])
