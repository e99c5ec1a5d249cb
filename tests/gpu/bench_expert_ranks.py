"""Expert parallelism over several GPUs of one host: the op against one GPU, the server against one process, and times.

Run on a machine with as many GPUs as ranks: `python tests/gpu/bench_expert_ranks.py OUT.json`. Without a GPU the same
runs over gloo under Triton's interpreter (`TRITON_INTERPRET=1 ... --model examples/models/tiny-moe`), its times then
say nothing. Exits 1 where a result is wrong; the file is written before that.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from xkernels.device import live
from xkernels.ops import expert_parallel as ep
from xkernels.ops.fused_experts import fused_experts, fused_experts_reference, prepare_experts

MOST_FAST = 1e-2  # relative error of a sum in another order, against the float32 twin
MODES = (("fast", 1), ("fast", 2), ("deterministic", 1), ("deterministic", 2))  # with the parts that rows travel in


@dataclass(frozen=True)
class Size:
    """The layer that is run: DeepSeek-OCR-2's on a GPU, a small one under the interpreter."""

    experts: int
    topk: int
    hidden: int
    width: int
    dtype: torch.dtype
    tile: dict[str, int]
    checked: tuple[int, ...]
    timed: tuple[int, ...]
    repeats: int

    @classmethod
    def of(cls, kind: str) -> Size:
        """The size for a kind of device."""
        tile = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
        if kind == "cpu":
            return cls(8, 2, 128, 16, torch.float32, tile | {"BLOCK_SIZE_N": 32}, (1, 7), (4,), 1)
        tile |= {"num_warps": 4, "num_stages": 4}
        return cls(64, 6, 1280, 896, torch.bfloat16, tile, (1, 7, 64, 1031), (1, 16, 128, 1024, 4096), 20)

    def weights(self, part: slice = slice(None)) -> Any:
        """The experts of `part`, the same on every rank."""
        where = live_here().torch_device()
        g = torch.Generator(where).manual_seed(1)
        w1 = torch.randn(self.experts, 2 * self.width, self.hidden, generator=g, device=where) / self.hidden**0.5
        w2 = torch.randn(self.experts, self.hidden, self.width, generator=g, device=where) / self.width**0.5
        return prepare_experts(w1[part].to(self.dtype), w2[part].to(self.dtype))

    def tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, router weights and choices, the same on every rank."""
        where = live_here().torch_device()
        g = torch.Generator(where).manual_seed(2)
        x = torch.randn(count, self.hidden, generator=g, device=where).to(self.dtype)
        logits = torch.randn(count, self.experts, generator=g, device=where)
        score, ids = torch.topk(torch.softmax(logits, -1), self.topk)
        return x, score.float().contiguous(), ids.int()

    def layout(self, group: Any, mode: Any = "fast", parts: int = 1, quant: str | None = None) -> ep.EpLayout:
        """This size's experts over `group`."""
        return ep.ep_layout(
            group, num_experts=self.experts, hidden=self.hidden, topk=self.topk, mode=mode, backend="triton",
            activations=self.dtype, device=live_here().torch_device(), parts=parts, quant=quant,
        )  # fmt: skip

    def configs(self, _: int) -> tuple[dict[str, int], dict[str, int]]:
        """One tile for every number of rows, so that the same sum has the same bits."""
        return self.tile, self.tile


_RANK = 0


def live_here() -> Any:
    """This rank's device."""
    return live(_RANK if live().kind != "cpu" else 0)


def share(count: int, rank: int, world: int) -> slice:
    """This rank's tokens of `count`."""
    per = -(-count // world)
    return slice(min(rank * per, count), min((rank + 1) * per, count))


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error; 0 for no rows."""
    return float((got.float() - want.float()).norm() / want.float().norm()) if want.numel() else 0.0


def check(size: Size, rank: int, world: int, alone: Any) -> list[dict[str, Any]]:
    """Each mode against this GPU alone, which holds all experts, and against the float32 twin."""
    rows = []
    every, mine_only = size.weights(), size.weights(size.layout(dist.group.WORLD).local_experts)
    for count in size.checked:
        x, w, ids = size.tokens(count)
        mine = share(count, rank, world)
        want = fused_experts_reference(x.float(), every, w, ids)[mine]
        single = size.layout(alone, "deterministic")
        whole = ep.ep_fused_experts(x, every, w, ids, single, configs=size.configs)[mine]
        for mode, parts in MODES:
            lay = size.layout(dist.group.WORLD, mode, parts)
            got = ep.ep_fused_experts(x[mine], mine_only, w[mine], ids[mine], lay, configs=size.configs)
            rows.append({"tokens": count, "mode": mode, "parts": parts, "error": error_of(got, want),
                         "error_alone": error_of(whole, want), "same_bits": bool(torch.equal(got, whole))})  # fmt: skip
        lay = size.layout(dist.group.WORLD, quant="fp8_w8a8")
        got = ep.ep_fused_experts(x[mine], mine_only, w[mine], ids[mine], lay, configs=size.configs)
        rows.append({"tokens": count, "mode": "fast, rows as FP8", "parts": 1, "error": error_of(got, want)})
    return rows


def wrong(rows: list[dict[str, Any]]) -> list[str]:
    """What of `check` must not be: an error too large, or other bits in deterministic mode."""
    limit = {"fast, rows as FP8": 0.1}
    return [
        f"{row}"
        for row in rows
        if row["error"] > limit.get(row["mode"], MOST_FAST) or (row["mode"] == "deterministic" and not row["same_bits"])
    ]


def wall_us(work: Callable[[], Any], repeats: int) -> float:
    """Microseconds of one call, begun together: the slowest rank's mean, median of five rounds."""
    device, found = live_here(), []
    for number in range(6):
        dist.all_reduce(torch.zeros(1, device=device.torch_device()))
        device.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        device.synchronize()
        took = torch.tensor((time.perf_counter() - began) / repeats * 1e6, device=device.torch_device())
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if number:  # the first compiles and connects
            found.append(float(took))
    return round(statistics.median(found), 1)


def times(size: Size, world: int) -> list[dict[str, Any]]:
    """A layer over all ranks against one GPU that holds all experts and has all tokens; and the bare exchange."""
    rows = []
    every, mine_only = size.weights(), size.weights(size.layout(dist.group.WORLD).local_experts)
    for count in size.timed:
        x, w, ids = size.tokens(count * world)
        row: dict[str, Any] = {"tokens_per_rank": count}

        def alone(x: torch.Tensor = x, w: torch.Tensor = w, ids: torch.Tensor = ids) -> Any:
            return fused_experts(x, every, w, ids, backend="triton", up=size.tile, down=size.tile)

        row["one_gpu_us"] = wall_us(alone, size.repeats)
        for mode, parts in MODES[:3]:
            lay = size.layout(dist.group.WORLD, mode, parts)
            part = share(count * world, dist.get_rank(), world)
            a, b, c = x[part], w[part], ids[part]

            def spread(a: torch.Tensor = a, b: torch.Tensor = b, c: torch.Tensor = c, lay: Any = lay) -> Any:
                return ep.ep_fused_experts(a, mine_only, b, c, lay, configs=size.configs)

            row[f"{mode}_{parts}_us"] = wall_us(spread, size.repeats)
        source = x[:count].repeat(world, 1)
        target = torch.empty_like(source)
        row["exchange_us"] = wall_us(partial(dist.all_to_all_single, target, source), size.repeats)
        leaves = source.numel() * source.element_size() * (world - 1) / world
        row["exchange_gb_s"] = round(leaves / row["exchange_us"] / 1e3, 2)
        rows.append(row)
    return rows


def be_rank(rank: int, world: int, meet: str, out: Path) -> int:
    """One rank of the op's part."""
    global _RANK
    _RANK = rank
    device = live_here()
    torch.set_num_threads(1)
    with device.current(), torch.inference_mode():
        dist.init_process_group("gloo" if device.kind == "cpu" else "nccl", init_method=f"file://{meet}", rank=rank,
                                world_size=world, timeout=timedelta(seconds=120))  # fmt: skip
        groups = [dist.new_group([one]) for one in range(world)]
        size = Size.of(device.kind)
        found = {"device": device.identity().name, "identity": device.identity().identity,
                 "checks": check(size, rank, world, groups[rank])}  # fmt: skip
        out.write_text(json.dumps(found))
        out.write_text(json.dumps(found | {"times": times(size, world)}))
        dist.destroy_process_group()
    return 0


def op_part(world: int, folder: Path, seconds: float) -> tuple[list[dict[str, Any]], list[str]]:
    """All ranks: what each wrote, and what failed."""
    argv = [sys.executable, "-P", __file__, "-", f"--ranks={world}", f"--meet={folder / 'meet'}"]
    logs = [folder / f"rank-{rank}.log" for rank in range(world)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as stream:
            processes.append(subprocess.Popen([*argv, f"--rank={rank}", f"--rank-out={folder / f'{rank}.json'}"],
                                              stdout=stream, stderr=stream))  # fmt: skip
    failed, deadline = [], time.monotonic() + seconds
    for rank, process in enumerate(processes):
        try:
            code = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code:
            failed.append(f"rank {rank} ended with {code}: {logs[rank].read_text()[-1500:]}")
    files = [folder / f"{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.is_file() else {} for file in files], failed


class Server:
    """One server of the end-to-end part."""

    def __init__(self, name: str, model: str, options: list[str], folder: Path) -> None:
        self.name, self.address, self.log = name, folder / f"{name}.address", folder / f"{name}.log"
        argv = [sys.executable, "-P", "-m", "serving.server", f"--model={model}", "--configs=none", "--graph=eager",
                f"--address-file={self.address}", *options]  # fmt: skip
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(argv, stdout=stream, stderr=stream)

    def wait(self, deadline: float) -> None:
        """Until it answers; RuntimeError with the end of its log."""
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(self.address.read_text().strip() + "/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"{self.name} is not ready ({self.process.poll()}): {self.log.read_text()[-1500:]}")

    def ask(self, prompts: list[list[int]], tokens: int) -> tuple[list[dict[str, Any]], float]:
        """All prompts at once; their answers, and seconds."""

        def one(prompt: list[int]) -> dict[str, Any]:
            body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "logprobs": 1}
            url, data = self.address.read_text().strip() + "/v1/completions", json.dumps(body).encode()
            request = urllib.request.Request(url, data, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as reply:
                choice = json.loads(reply.read())["choices"][0]
            return {"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}

        began = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(one, prompts))
        return found, time.perf_counter() - began

    def ranks(self) -> list[int]:
        """Process ids of its further expert ranks."""

        def children(pid: int) -> list[int]:
            return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

        below = [rank for worker in children(self.process.pid) for rank in children(worker)]
        return [rank for rank in below if b"expert_group" in Path(f"/proc/{rank}/cmdline").read_bytes()]

    def end(self) -> tuple[int, float]:
        """Ask it to end: exit code and seconds."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(20), round(time.monotonic() - began, 1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(), round(time.monotonic() - began, 1)


def compared(alone: list[dict[str, Any]], spread: list[dict[str, Any]]) -> dict[str, Any]:
    """How many answers agree; where each of the others parts, with both log-probabilities there; the drift before."""
    same, parted, drift = 0, [], 0.0
    for a, b in zip(alone, spread, strict=True):
        at = next((i for i, pair in enumerate(zip(a["tokens"], b["tokens"], strict=True)) if pair[0] != pair[1]), None)
        same += at is None
        drift = max([drift, *(abs(x - y) for x, y in zip(a["logprobs"][:at], b["logprobs"][:at], strict=True))])
        if at is not None:
            parted.append({"token": at, "logprobs": [a["logprobs"][at], b["logprobs"][at]]})
    return {"answers": len(alone), "same": same, "parted": parted, "most_logprob_drift": round(drift, 6)}


def server_part(world: int, model: str, folder: Path, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """The engine over one process and over all ranks: the same greedy answers, a clean end, and a killed rank."""
    gpu = live().kind != "cpu"
    backend = "--backend=triton" if gpu else "--backend=torch"
    spread = f"--ep-size={world}"
    exact = {"one": [backend], "fast": [backend, spread],
             "deterministic": ["--backend=triton", spread, "--ep-mode=deterministic"]}  # fmt: skip
    plans = {f"float32-{name}": ["--dtype=float32", *options] for name, options in exact.items()}
    if gpu:
        plans |= {f"bfloat16-{name}": ["--dtype=bfloat16", *options] for name, options in exact.items()}
    slots = f"--slots={len(prompts)}"
    out: dict[str, Any] = {"answers": {}, "step_ms": {}, "ends": {}}
    with all_ended([Server(name, model, [*options, slots], folder) for name, options in plans.items()]) as servers:
        deadline = time.monotonic() + 90
        for server in servers:
            server.wait(deadline)
        said = {}
        for server in servers:
            server.ask(prompts, 2)  # compiles
            said[server.name], took = server.ask(prompts, tokens)
            out["step_ms"][server.name] = round(took / tokens * 1e3, 2)
        for name in said:
            dtype, _, how = name.partition("-")
            if how != "one":
                out["answers"][name] = compared(said[f"{dtype}-one"], said[name])
        victim, *others = reversed(servers)
        os.kill(victim.ranks()[0], signal.SIGKILL)
        try:
            victim.ask(prompts[:1], 1)
            out["killed_rank"] = "was not noticed"
        except OSError:
            out["killed_rank"] = {"exit": victim.process.wait(30), "said": victim.log.read_text()[-200:]}
        out["ends"] = {server.name: server.end() for server in others}
    return out


@contextmanager
def all_ended(servers: list[Server]) -> Iterator[list[Server]]:
    """Whatever happens, none of them is left."""
    try:
        yield servers
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()


def failures(served: dict[str, Any]) -> list[str]:
    """What of `server_part` must not be."""
    found = [f"{name}: {told}" for name, told in served["answers"].items()
             if name.startswith("float32") and told["same"] != told["answers"]]  # fmt: skip
    found += [f"{name} ended with {code}" for name, (code, _) in served["ends"].items() if code]
    killed = served["killed_rank"]
    return found if isinstance(killed, dict) and killed["exit"] == 3 else [*found, f"killed rank: {killed}"]


def main() -> int:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("out", type=Path)
    add("--ranks", type=int, default=2)
    add("--model", default="examples/models/deepseek-ocr-2")
    add("--tokens", type=int, default=32, help="of an answer")
    add("--requests", type=int, default=8)
    add("--skip-server", action="store_true", help="the op's part alone")
    add("--rank", type=int, help=argparse.SUPPRESS)
    add("--meet", help=argparse.SUPPRESS)
    add("--rank-out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return be_rank(args.rank, args.ranks, args.meet, args.rank_out)
    device = live()
    body: dict[str, Any] = {
        "schema": 1, "name": "expert-ranks", "device": device.identity().name, "ranks": args.ranks,
        "torch": torch.__version__, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python tests/gpu/bench_expert_ranks.py OUT.json --ranks {args.ranks}",
    }  # fmt: skip
    with TemporaryDirectory(prefix="moegate-ranks-") as folder:
        body["ranks_said"], bad = op_part(args.ranks, Path(folder), 120)
        bad += [line for rank in body["ranks_said"] for line in wrong(rank.get("checks", []))]
        args.out.write_text(json.dumps(body | {"wrong": bad}, indent=1) + "\n")
        if not args.skip_server:
            prompts = [[(7 * at + 31 * index) % 500 + 2 for at in range(12 + index)] for index in range(args.requests)]
            try:
                body["server"] = server_part(args.ranks, args.model, Path(folder), prompts, args.tokens)
                bad += failures(body["server"])
            except (RuntimeError, OSError) as error:
                bad.append(f"server: {error}")
    args.out.write_text(json.dumps(body | {"wrong": bad}, indent=1) + "\n")
    first = body["ranks_said"][0]
    for row in [*first.get("checks", []), *first.get("times", [])]:
        print(*(f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()))
    print(json.dumps(body.get("server")), *bad, sep="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
