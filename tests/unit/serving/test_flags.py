"""Our command lines for other people's servers against what their own parsers say (recorded, with the version)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from serving import engines
from serving.engines import Spec

MODEL = Path("examples/models/tiny-moe").resolve()
FOLDER = Path(__file__).parent / "flags"
SPECS = [
    Spec(MODEL, backend="triton", graph="eager", dtype="bfloat16", seed=5, slots=96, length=512, tp=2, ep=2,
         memory_share=0.5),
    Spec(MODEL, backend="auto", graph="full", dtype="auto"),
    Spec(MODEL, backend="flashinfer_cutlass", graph="full", dtype="float16", length=64, memory_share=0.25),
]  # fmt: skip
SKIPPED = {"sglang": 3, "vllm": 4}  # the interpreter and how the server is started
WANTED: dict[str, dict[str, list[Any]]] = {
    "sglang": {
        "moe_runner_backend": ["triton", "auto", "flashinfer_cutlass"], "dtype": ["bfloat16", "auto", "float16"],
        "tp_size": [2, 1, 1], "ep_size": [2, 1, 1], "random_seed": [5, 0, 0], "port": [8000, 8001, 8002],
        "host": ["127.0.0.1"] * 3, "load_format": ["dummy"] * 3, "disable_radix_cache": [True] * 3,
        "cuda_graph_backend_decode": ["disabled", None, None], "max_running_requests": [96, None, None],
        "context_length": [512, None, 64], "mem_fraction_static": [0.44, None, 0.22],
    },
    "vllm": {
        "moe_backend": ["triton", "auto", "flashinfer_cutlass"], "dtype": ["bfloat16", "auto", "float16"],
        "tensor_parallel_size": [2, 1, 1], "enable_expert_parallel": [True, None, None], "seed": [5, 0, 0],
        "port": [8000, 8001, 8002], "host": ["127.0.0.1"] * 3, "load_format": ["dummy"] * 3,
        "enforce_eager": [True, None, None], "max_num_seqs": [96, None, None], "max_model_len": [512, None, 64],
        "gpu_memory_utilization": [0.45, None, 0.225],
    },
}  # fmt: skip


def command(engine: str, spec: Spec, work: Path, port: int) -> list[str]:
    """The arguments of one command line, from the first flag of its server on."""
    work.mkdir()
    return list(engines.get(engine).command(spec, work, port).argv[SKIPPED[engine] :])


def flags_used(engine: str, tmp_path: Path) -> list[str]:
    """Every flag that our engine file can write."""
    lines = [command(engine, spec, tmp_path / str(index), 8000 + index) for index, spec in enumerate(SPECS)]
    return sorted({word for line in lines for word in line if word.startswith("--")})


def recorded(engine: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{engine}.json").read_text())
    return found


def parser_of(facts: dict[str, Any]) -> argparse.ArgumentParser:
    """A parser that takes exactly the recorded flags."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    kinds = {"int": int, "float": float, "str": str}
    for flag, fact in facts["flags"].items():
        if fact["values"]:
            parser.add_argument(flag, dest=fact["dest"], type=kinds[fact["type"]], choices=fact["choices"])
        else:
            parser.add_argument(flag, dest=fact["dest"], action="store_const", const=not flag.startswith("--no-"))
    return parser


@pytest.mark.parametrize("engine", sorted(WANTED))
def test_every_flag_is_one_that_the_real_server_has_and_means_what_we_mean(engine: str, tmp_path: Path) -> None:
    facts = recorded(engine)
    assert facts["engine"] == engine
    parser = parser_of(facts)
    for index, spec in enumerate(SPECS):
        line = command(engine, spec, tmp_path / str(index), 8000 + index)
        known, rest = parser.parse_known_args(line)
        model = {"sglang": [], "vllm": [line[0]]}[engine]  # vLLM takes the model without a flag
        assert rest == model
        for dest, values in WANTED[engine].items():
            # Texts, because a server may read a number by a function of its own (`4k`).
            assert str(getattr(known, dest)) == str(values[index]), (engine, dest)


@pytest.mark.parametrize("engine", sorted(WANTED))
def test_the_record_holds_the_flags_that_we_use_and_no_others(engine: str, tmp_path: Path) -> None:
    assert sorted(recorded(engine)["flags"]) == flags_used(engine, tmp_path)
    assert recorded(engine)["version"] in (Path("docs/serving.md").read_text())


def test_a_flag_that_a_server_does_not_have_is_found(tmp_path: Path) -> None:
    facts = recorded("sglang")
    del facts["flags"]["--moe-runner-backend"]
    line = command("sglang", SPECS[0], tmp_path / "0", 1)
    assert "--moe-runner-backend" in parser_of(facts).parse_known_args(line)[1]
    with pytest.raises(argparse.ArgumentError, match="invalid choice"):
        parser_of(recorded("sglang")).parse_known_args(["--moe-runner-backend", "nonsense"])
