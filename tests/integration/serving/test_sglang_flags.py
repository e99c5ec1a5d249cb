"""Our SGLang command lines against SGLang's own argument parser, and the record of it that everybody's tests use.

Needs SGLang's Python package: installed, or unpacked from its wheel and named by MOEGATE_SGLANG_PATH (a PATH-like list
of folders; the parser needs no torch extension, only orjson, psutil, pybase64, pillow, msgspec, pyzmq and ipython).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from serving import engines
from serving.engines import Spec

MODEL = Path("examples/models/tiny-moe").resolve()
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for line in json.loads(sys.argv[1]):
    args = vars(parser.parse_args(line))
    names = ("model_path", "moe_runner_backend", "load_format", "host", "port", "random_seed", "tp_size", "ep_size",
             "cuda_graph_backend_decode", "max_running_requests", "context_length", "dtype", "disable_radix_cache")
    print(json.dumps({name: args[name] for name in names}))
"""


@pytest.fixture(scope="module")
def parse():
    env = {**os.environ, "PYTHONPATH": os.environ.get("MOEGATE_SGLANG_PATH", "")}

    def call(*lines: list[str]) -> list[dict]:
        argv = [sys.executable, "-P", "-c", PARSE, json.dumps(lines)]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
        if "ModuleNotFoundError" in done.stderr:
            pytest.skip(f"SGLang's parser cannot be loaded: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return call


RECORD = Path("tests/unit/serving/flags").resolve()


def test_the_record_of_its_flags_is_what_it_says(parse, tmp_path: Path) -> None:
    parse()  # skips where there is no parser
    wanted = json.loads((RECORD / "sglang.json").read_text())
    argv = [sys.executable, "-P", str(RECORD / "record.py"), "sglang", str(tmp_path / "now.json"), *wanted["flags"]]
    env = {**os.environ, "PYTHONPATH": os.environ.get("MOEGATE_SGLANG_PATH", "")}
    subprocess.run(argv, env=env, check=True, capture_output=True, timeout=120)
    now = json.loads((tmp_path / "now.json").read_text())
    if now["version"] != wanted["version"]:
        pytest.skip(f"this is SGLang {now['version']}, the record is of {wanted['version']}")
    assert now == wanted


def test_every_command_line_parses_to_what_was_asked(parse, tmp_path: Path) -> None:
    specs = [
        Spec(MODEL, backend=backend, graph=graph, dtype=dtype, seed=5, slots=slots, length=slots * 16, tp=tp, ep=tp)
        for backend in ("auto", "triton", "cutlass", "deep_gemm", "aiter", "intel_xpu", "flashinfer_cutlass")
        for graph, dtype, slots, tp in (("eager", "bfloat16", 96, 1), ("full", "auto", 0, 2))
    ]
    lines = []
    for index, spec in enumerate(specs):
        work = tmp_path / str(index)
        work.mkdir()
        lines.append(list(engines.get("sglang").command(spec, work, 8000 + index).argv[3:]))
    for index, (spec, got) in enumerate(zip(specs, parse(*lines), strict=True)):
        assert got["moe_runner_backend"] == spec.backend
        assert (got["load_format"], got["host"], got["port"]) == ("dummy", "127.0.0.1", 8000 + index)
        assert (got["random_seed"], got["tp_size"], got["ep_size"]) == (5, spec.tp, spec.ep)
        assert got["cuda_graph_backend_decode"] == ("disabled" if spec.graph == "eager" else None)
        assert got["max_running_requests"] == (spec.slots or None)
        assert got["disable_radix_cache"]
        assert Path(got["model_path"]).is_dir()


def test_a_backend_that_sglang_does_not_know_is_refused_by_its_parser(parse, tmp_path: Path) -> None:
    line = list(engines.get("sglang").command(Spec(MODEL, backend="nonsense"), tmp_path, 1).argv[3:])
    with pytest.raises(AssertionError, match="invalid choice"):
        parse(line)
