"""Record what a real server's argument parser says of the flags that our engine files use.

    PYTHONPATH=<unpacked sglang wheel>:<its needs> python tests/unit/serving/flags/record.py sglang OUT.json FLAG...

Run by an interpreter that can import the engine. `test_flags.py` reads the result where there is no engine, and
`tests/integration/serving` asks again where there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def sglang() -> tuple[str, argparse.ArgumentParser]:
    """`python -m sglang.launch_server`."""
    from importlib import import_module

    parser = argparse.ArgumentParser()
    import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return str(import_module("sglang").__version__), parser


def vllm() -> tuple[str, argparse.ArgumentParser]:
    """`vllm serve`."""
    from importlib import import_module

    utils = import_module("vllm.utils.argparse_utils")
    parser = import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser(utils.FlexibleArgumentParser())
    return str(import_module("vllm").__version__), parser


PARSERS: dict[str, Callable[[], tuple[str, argparse.ArgumentParser]]] = {"sglang": sglang, "vllm": vllm}


def facts(engine: str, flags: list[str]) -> dict[str, Any]:
    """Version and, for each flag that the parser has, where its value goes and which values it takes."""
    version, parser = PARSERS[engine]()
    found: dict[str, Any] = {}
    for action in parser._actions:
        for flag in set(flags) & set(action.option_strings):
            kind = getattr(action.type, "__name__", None)
            found[flag] = {
                "dest": action.dest,
                "values": 0 if action.nargs == 0 else 1,
                "type": kind if kind in ("int", "float") else "str",
                "choices": None if action.choices is None else sorted(map(str, action.choices)),
            }
    return {"engine": engine, "version": version, "flags": dict(sorted(found.items()))}


if __name__ == "__main__":
    name, out, *wanted = sys.argv[1:]
    Path(out).write_text(json.dumps(facts(name, wanted), indent=1) + "\n", encoding="utf-8")
