"""The vLLM engine file and our load client against a real vLLM on the CPU (`make test-vllm`).

One server, and eight loads on it in turn at each concurrency (MOEGATE_VLLM_ROUNDS: so many times eight), ours and those
of vLLM's own client in ABBA order. A client's mean TPOT is divided by what the server measured of the very same
requests (`serving.load.served`): that takes out how fast the machine was meanwhile, and, with several requests at a
time, whose prefill fell between whose tokens. What is left is what client and wire add, and in that our client has to
be within 3 % of vLLM's. MOEGATE_VLLM_STRETCH=0.05 plants a client that sees 5 % more: the test must fail with it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from moegate.records import Measurement, read
from moegate.stats import hodges_lehmann, interval
from serving.load.importers import import_result
from tests.standin.environment import number

PYTHON = os.environ.get("MOEGATE_VLLM_PYTHON", "")
needs_vllm = pytest.mark.skipif(not PYTHON, reason="needs a vLLM of its own environment: make test-vllm builds it")
ROOT = Path(__file__).resolve().parents[3]
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 512,
    "norm_topk_prob": True, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "torch_dtype": "float32",
    "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
REQUESTS = {1: 16, 4: 32}  # of a load, by its concurrency
INPUT, OUTPUT = 32, 128
ORDER = "ABBAABBA" * number("MOEGATE_VLLM_ROUNDS", 1, least=1)  # A: ours, B: theirs
STRETCH = number("MOEGATE_VLLM_STRETCH", 0.0, least=0.0)
RESULT = os.environ.get("MOEGATE_VLLM_RESULT")  # where the comparison is kept
MARGIN = 0.03
LOADS = Path(__file__).with_name("vllm_loads.py")
RECORD = ROOT / "tests" / "unit" / "serving" / "flags"


@needs_vllm
@pytest.mark.slow
def test_the_record_of_its_flags_is_what_it_says(tmp_path: Path) -> None:
    wanted = json.loads((RECORD / "vllm.json").read_text())
    argv = [PYTHON, "-P", str(RECORD / "record.py"), "vllm", str(tmp_path / "now.json"), *wanted["flags"]]
    subprocess.run(argv, check=True, capture_output=True, timeout=300)
    assert json.loads((tmp_path / "now.json").read_text()) == wanted


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_client_and_engine_against_a_real_vllm(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    before = os.getloadavg()
    outs = {many: [tmp_path / f"{many}-{index}.json" for index in range(len(ORDER))] for many in REQUESTS}
    loads = [{"client": "ours" if client == "A" else "theirs", "concurrency": many, "requests": requests,
              "out": str(out)}
             for many, requests in REQUESTS.items() for client, out in zip(ORDER, outs[many], strict=True)]  # fmt: skip
    # The first load is only there to warm everything up.
    warm = {"client": "ours", "concurrency": 4, "requests": 8, "out": str(tmp_path / "warm.json")}
    plan = {"loads": [warm, *loads], "input": INPUT, "output": OUTPUT, "stretch": STRETCH}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    _launch(tmp_path, [PYTHON, "-P", str(LOADS), str(tmp_path / "plan.json")])

    found = [{"concurrency": many, "requests": REQUESTS[many], **compared([_load(out, client, many) for client, out in
                                               zip(ORDER, outs[many], strict=True)], ORDER)}
             for many in REQUESTS]  # fmt: skip
    if RESULT:
        _keep(Path(RESULT), found, before)
    unclear = []
    for one in found:
        print(f"\n{json.dumps({name: value for name, value in one.items() if name != 'pairs'})}")
        verdict = judged(one, MARGIN)
        assert verdict != "beyond", one
        unclear += [one] if verdict == "unclear" else []
    if unclear:
        pytest.skip(f"this machine is too noisy to tell {MARGIN:.0%}: {unclear}")


def _launch(folder: Path, command: list[str]) -> None:
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "MOEGATE"))},
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Its threads spin, and would keep API server and client from a processor whenever they have something to do.
        "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
    }
    argv = [PYTHON, "-P", "-m", "serving", "launch", "--engine=vllm", f"--model={folder / 'model'}", "--slots=8",
            "--length=512", "--configs=none", "--", *command]  # fmt: skip
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stderr[-3000:]


Means = tuple[float, float]  # of one load: mean TPOT in ms as the client saw it, and as the server did


def compared(loads: list[Means], order: str) -> dict[str, Any]:
    """Each client over the server, and ours over theirs in that, as neighbours in time, with its interval."""
    pairs = [(loads[at], loads[at + 1])[:: 1 if order[at] == "A" else -1] for at in range(0, len(loads), 2)]
    ours, theirs = ([math.log(pair[who][0] / pair[who][1]) for pair in pairs] for who in (0, 1))
    logs = [mine - other for mine, other in zip(ours, theirs, strict=True)]
    bounds = interval(logs)
    return {
        "ours_over_server": _ratio(ours), "theirs_over_server": _ratio(theirs),
        "difference": round(math.expm1(float(hodges_lehmann(logs))), 5), "low": round(math.expm1(bounds.low), 5),
        "high": round(math.expm1(bounds.high), 5), "level": round(bounds.level, 4),
        "pairs": [{name: round(value, 4) for name, value in
                   zip(("ours_ms", "ours_server_ms", "theirs_ms", "theirs_server_ms"), (*mine, *other), strict=True)}
                  for mine, other in pairs],
    }  # fmt: skip


def _ratio(logs: list[float]) -> float:
    return round(math.exp(float(hodges_lehmann(logs))), 5)


def judged(found: dict[str, Any], margin: float) -> str:
    """`within` the margin with the whole interval, `beyond` it, or `unclear` where the interval is too wide to tell."""
    low, high = found["low"], found["high"]
    if -margin <= low and high <= margin:
        return "within"
    fine = (high - low) / 2 <= margin
    return "beyond" if low > margin or high < -margin or (fine and abs(found["difference"]) > margin) else "unclear"


def _load(out: Path, client: str, concurrency: int) -> Means:
    """A load's TPOT by its client and by the server, after a look at everything else that the records have to say."""
    requests = REQUESTS[concurrency]
    told = json.loads(Path(f"{out}.server").read_text())
    assert told is not None, "the server's histograms are not of the requests of this load alone"
    assert told["requests"] == requests
    if client == "B":
        their = import_result(out)
        assert their.completed == requests
        assert their.numbers["total_output_tokens"] == requests * OUTPUT
        return their.numbers["mean_tpot_ms"], told["mean_tpot_ms"]
    measured = read(Measurement, out)
    (launch,) = measured.launches
    assert launch.void_reason is None
    assert launch.detail["total_output_tokens"] == requests * OUTPUT
    assert launch.proof is not None
    assert (launch.proof.engine, launch.proof.requested_backend) == ("vllm", "auto")
    assert launch.proof.resolved_backend == "cpu"
    assert measured.environment["vllm"].startswith("0.32")
    assert launch.device.kind == "cpu"
    return float(launch.detail["mean_tpot_ms"]), told["mean_tpot_ms"]


def _keep(path: Path, found: list[dict[str, Any]], before: tuple[float, float, float]) -> None:
    notes = json.loads(path.read_text())["notes"] if path.is_file() else []
    record = {
        "name": "client-against-vllm-bench-serve", "schema": 2, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{os.cpu_count()} cores", "load_average": [round(before[0], 2), round(os.getloadavg()[1], 2)],
        "command": f"MOEGATE_VLLM_ROUNDS={len(ORDER) // 8} make test-vllm", "input": INPUT, "output": OUTPUT,
        "margin": MARGIN, "loads": found, "notes": notes,
    }  # fmt: skip
    path.write_text(json.dumps(record, indent=1) + "\n")


def planted(mine: float, other: float, noise: float) -> list[Means]:
    """Eight loads on a server that is up to twice as fast from one to the next; clients that add a share of it."""
    servers = [8.0, 12.0, 6.0, 9.0, 11.0, 7.0, 13.0, 8.5]
    adds = [mine if client == "A" else other for client in "ABBAABBA"]
    return [(server * (1 + add + noise * (-1) ** index * (index % 3)), server)
            for index, (server, add) in enumerate(zip(servers, adds, strict=True))]  # fmt: skip


@pytest.mark.parametrize(
    ("mine", "other", "noise", "verdict"),
    [(0.012, 0.01, 0.002, "within"), (0.062, 0.01, 0.002, "beyond"), (0.01, 0.062, 0.002, "beyond"),
     (0.028, 0.0, 0.002, "unclear"), (0.012, 0.01, 0.05, "unclear"), (0.4, 0.01, 0.05, "beyond")],
)  # fmt: skip
def test_the_servers_own_speed_is_no_part_of_the_comparison(
    mine: float, other: float, noise: float, verdict: str
) -> None:
    found = compared(planted(mine, other, noise), "ABBAABBA")
    assert judged(found, 0.03) == verdict, found
    assert found["low"] <= found["difference"] <= found["high"]
    assert found["difference"] == pytest.approx((1 + mine) / (1 + other) - 1, abs=2 * noise + 1e-4)
    assert [pair["ours_server_ms"] for pair in found["pairs"]] == [8.0, 9.0, 11.0, 8.5]
    assert [pair["theirs_server_ms"] for pair in found["pairs"]] == [12.0, 6.0, 7.0, 13.0]
