"""The loads of `test_vllm.py`, one after the other on the server of this launch: `vllm_loads.py PLAN.json`.

Every load leaves its client's own result at `out` and what the server measured of the very same requests beside it,
at `out` + `.server`. The plan: {"loads": [{"client": "ours" | "theirs", "concurrency", "requests", "out"}, ...],
"input", "output", "stretch": by how much the clock of our client runs too fast}.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp

from moegate.records import Measurement
from moegate.records import read as read_record
from serving import apikey
from serving.load import served

URL = os.environ["MOEGATE_BASE_URL"]
# What a client that needs longer for a token than it takes would see. A delay that is the same for each of them is
# in no TPOT: it moves the first and the last alike.
STRETCHED = """
import time, types
from serving.load import client
client.time = types.SimpleNamespace(perf_counter=lambda: {factor!r} * time.perf_counter())
from serving.__main__ import main
main()
"""


def ours(load: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """`serving bench`: it reads the server's histograms itself, between its warm-up and its end."""
    factor = 1 + plan["stretch"]
    start = ["-m", "serving"] if factor == 1 else ["-c", STRETCHED.format(factor=factor)]
    return [sys.executable, "-P", *start, "bench", f"--requests={load['requests']}",
            f"--concurrency={load['concurrency']}", f"--input={plan['input']}", f"--output={plan['output']}",
            f"--out={load['out']}", "--max-lag=1000"]  # fmt: skip


def theirs(load: dict[str, Any], plan: dict[str, Any], model: str) -> list[str]:
    """`vllm bench serve` without warm-up or test request of its own: every one that it sends is one that it counts."""
    out = Path(load["out"])
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai", "--endpoint",
             "/v1/completions", "--base-url", URL, "--model", model, "--tokenizer", model, "--dataset-name", "random",
             "--random-input-len", plan["input"], "--random-output-len", plan["output"], "--ignore-eos",
             "--num-prompts", load["requests"], "--max-concurrency", load["concurrency"],
             "--num-warmups", 0, "--ready-check-timeout-sec", 0, "--temperature", 0, "--save-result",
             "--result-dir", out.parent, "--result-filename", out.name,
             "--percentile-metrics", "ttft,tpot,itl,e2el"]  # fmt: skip
    return list(map(str, words))


async def ask() -> tuple[str, dict[str, served.Total]]:
    """The model's name and the histograms."""
    async with aiohttp.ClientSession(headers=apikey.headers()) as session:
        async with session.get(URL + "/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        return model, await served.read(session, URL)


async def after(before: dict[str, served.Total], requests: int) -> dict[str, served.Total]:
    """The histograms once they have these requests too."""
    async with aiohttp.ClientSession() as session:
        return await served.settled(session, URL, before, requests)


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    usable = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, usable[1:] or usable)  # the first is the server's threads'
    for load in plan["loads"]:
        if load["client"] == "ours":
            subprocess.run(ours(load, plan), check=True)
            means = read_record(Measurement, Path(load["out"])).launches[0].detail.get("server")
        else:
            model, before = asyncio.run(ask())
            subprocess.run(theirs(load, plan, model), check=True)
            means = served.means(before, asyncio.run(after(before, load["requests"])), load["requests"])
        Path(load["out"] + ".server").write_text(json.dumps(means))


if __name__ == "__main__":
    main()
