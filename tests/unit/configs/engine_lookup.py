"""Runs an engine's own lookup, taken from its wheel, for queries on standard input. A script, not a test.

Usage: python engine_lookup.py sglang|vllm WHEEL_FOLDER < queries.json > answers.json
The engine's torch, triton and server modules are replaced by the few names that its lookup touches.
"""

from __future__ import annotations

import ast
import functools
import json
import logging
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

STATE = {"device": "", "triton": "0.0.0"}


def _module(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


def load_sglang(wheel: Path) -> Any:
    """Execute SGLang's config module as it is, over stand-ins for what it imports."""
    execution = types.SimpleNamespace(deterministic=types.SimpleNamespace(enable_deterministic_inference=False))
    triton = types.SimpleNamespace()
    _module("torch", cuda=types.SimpleNamespace(is_available=lambda: False), dtype=object, float=object())
    _module("sglang.srt.runtime_context", get_exec=lambda: execution)
    _module("sglang.srt.utils", get_device_name=lambda: STATE["device"], is_hip=lambda: False)
    sys.modules["triton"] = triton  # type: ignore[assignment]
    path = wheel / "sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_config.py"
    namespace: dict[str, Any] = {"__name__": "engine", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    lookup = namespace["get_moe_configs"]

    def run(query: dict[str, Any]) -> Any:
        STATE["device"], triton.__version__ = query["device"], query["triton"]
        os.environ["SGLANG_MOE_CONFIG_DIR"] = query["root"]
        lookup.cache_clear()
        bn, bk = query["block"] or (0, 0)
        if "M" in query:
            namespace["_is_hip"] = query["vendor"] == "amd"
            namespace["_get_cuda_shared_memory_per_block_optin"] = lambda: query["smem"]
            block = list(query["block"]) if query["block"] else None
            found = namespace["get_default_config"](query["M"], query["E"], 0, 0, 1, query["dtype"], False, block)
            return {0: found}
        return lookup(query["E"], query["N"], query["dtype"], bn, bk, query["per_channel"], query["down"])

    return run


def load_vllm(wheel: Path) -> Any:
    """Execute the lookup functions of vLLM, cut out of their module, over stand-ins for its globals."""
    path = wheel / "vllm/model_executor/layers/fused_moe/fused_moe.py"
    wanted = {"get_config_file_name", "get_moe_configs", "get_default_config", "should_moe_wna16_use_cuda"}
    body = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    helpers = ast.parse((wheel / "vllm/utils/platform_utils.py").read_text()).body
    names = [n for n in helpers if isinstance(n, ast.FunctionDef) and n.name == "get_device_name_as_file_name"]
    logger = types.SimpleNamespace(info_once=lambda *a, **k: None, warning_once=lambda *a, **k: None)
    envs = types.SimpleNamespace(VLLM_BATCH_INVARIANT=False, VLLM_TUNED_CONFIG_FOLDER=None)
    platform = types.SimpleNamespace(get_device_name=lambda device_id=0: STATE["device"])
    _module("vllm.platforms", current_platform=platform)
    _module("vllm")
    namespace = {
        "os": os,
        "json": json,
        "re": re,
        "functools": functools,
        "cache": functools.cache,
        "envs": envs,
        "next_power_of_2": lambda n: 1 if n < 1 else 1 << (n - 1).bit_length(),
        "current_platform": platform,
        "logger": logger,
        "Any": Any,
        "__file__": "/nonexistent/fused_moe.py",
    }
    exec(compile(ast.Module(names + body, []), str(path), "exec"), namespace)
    lookup = namespace["get_moe_configs"]

    def run(query: dict[str, Any]) -> Any:
        STATE["device"], envs.VLLM_TUNED_CONFIG_FOLDER = query["device"], query["root"]
        lookup.cache_clear()
        namespace["get_device_name_as_file_name"].cache_clear()
        bn, bk = query["block"] or (0, 0)
        if "M" in query:
            platform.is_rocm = lambda: query["vendor"] == "amd"
            platform.is_cuda = lambda: query["vendor"] == "nvidia"
            block = list(query["block"]) if query["block"] else None
            found = namespace["get_default_config"](query["M"], query["E"], 0, 0, query["topk"], query["dtype"], block)
            return {0: found}
        return lookup(query["E"], query["N"], query["dtype"], bn, bk)

    return run


def main() -> None:
    """Answer every query: [[batch size, config], ...], null, or {"raises": name}."""
    logging.disable(logging.CRITICAL)
    run = {"sglang": load_sglang, "vllm": load_vllm}[sys.argv[1]](Path(sys.argv[2]))
    answers: list[Any] = []
    for query in json.load(sys.stdin):
        try:
            found = run(query)
            answers.append(None if not found else [[k, v] for k, v in found.items()])
        except Exception as error:
            answers.append({"raises": type(error).__name__})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
