"""Leases of (op, shape, batch-size group) to the GPUs of a Ray cluster.

Each lease is one Ray task that owns one GPU and starts `tuner tune` for its group as a fresh process. Before any of
them measures, every worker proves which physical device it has. What comes back are the groups' measurement records;
the files are written here, once, from all of them.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from moegate.errors import InfraError, PoolError
from moegate.exits import Exit
from moegate.extras import install
from moegate.records import DeviceIdentity, Measurement, from_json, read
from tuner.config import Config
from tuner.emit import Origin, emit_all, ensure_places
from tuner.finals import Final
from tuner.pipeline import TuneOptions, TuneResult, device_name_of
from tuner.ray.masks import MASKS, assert_distinct, child_mask, groups_for
from tuner.strategies.base import Cut, Findings

__all__ = ["lease_argv", "prove", "run_leases", "tune_on_cluster"]

PROVE = (
    "import json\nfrom xkernels.device import live\nfrom moegate.records import to_json\n"
    "print(json.dumps(to_json(live().identity())))"
)
_PROVE_S = 300


def tune_on_cluster(options: TuneOptions, address: str) -> TuneResult:
    """Tune on every GPU of a cluster and emit one set of files.

    Args:
        options: as for a tuning here.
        address: a Ray address, or `local` for a Ray of this machine's own.

    Raises:
        UsageError: the files cannot be written. PoolError: no Ray, no GPU. DeviceLost: two workers proved the same
        device. InfraError: a lease failed.
    """
    ensure_places(options.out, options.problem, vllm=options.vllm)
    groups = groups_for(options.batch_sizes, _connect(address))
    outcomes = run_leases([lease_argv(options, group) for group in groups], [sys.executable, "-P", "-c", PROVE])
    records = [from_json(Measurement, outcome["record"]) for outcome in outcomes]
    return _merged(options, records)


def lease_argv(options: TuneOptions, group: tuple[int, ...]) -> list[str]:
    """The command of one lease; `{out}` stands for a folder on the node that runs it."""
    argv = [sys.executable, "-P", "-m", "tuner", "tune", "--op", options.problem.op, "--effort", options.effort,
            "--batch-sizes", ",".join(map(str, group)), "--engine", options.engine, "--strategy", options.strategy,
            "--routing", options.routing, "--seed", str(options.seed), "--dtype", options.problem.dtype,
            "--shape", _shape(options), "--out", "{out}", "--result", "{out}/result.json"]  # fmt: skip
    argv += [] if options.prior else ["--no-prior"]
    argv += ["--without", ",".join(options.without)] if options.without else []
    argv += ["--budget", f"{options.budget_s}s"] if options.budget_s is not None else []
    argv += ["--python", options.python] if options.python != sys.executable else []
    return argv


def run_leases(commands: list[list[str]], proof: list[str]) -> list[dict[str, Any]]:
    """Run one command per GPU through Ray (connected already), after each GPU was proved to be another one.

    Returns, per command, {"identity", "mask", "record"}. `proof` prints a device identity as JSON on its last line.
    """
    import ray

    # In the decorator, not in options(): only then does a worker end after its task, and its device context with it.
    @ray.remote(num_gpus=1, max_retries=0, max_calls=1)
    def lease(command: list[str], identity: list[str], gate: Any) -> dict[str, Any]:
        ids = [str(value) for value in ray.get_runtime_context().get_accelerator_ids()["GPU"]]
        mask = child_mask(ids, os.environ, _is_intel())
        proved = prove(identity, mask)
        ray.get(gate.arrive.remote(proved["identity"]))
        try:
            return {"identity": proved["identity"], "mask": mask, "record": _run(command, mask)}
        finally:
            ray.get(gate.leave.remote(proved["identity"]))

    gate = ray.remote(num_cpus=0)(_Gate).remote()
    try:
        return list(ray.get([lease.remote(command, proof, gate) for command in commands]))
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        raise cause if isinstance(cause, InfraError) else InfraError(str(error)) from None
    except ray.exceptions.RayError as error:
        raise InfraError(f"a lease was lost: {type(error).__name__}: {error}"[:500]) from None
    finally:
        ray.kill(gate)


class _Gate:
    """Holds the proofs of all leases that run: whoever shows an identity that another one has is told so."""

    def __init__(self) -> None:
        self.identities: list[str] = []

    def arrive(self, identity: str) -> int:
        """Register one proof; DeviceLost for a device that another running lease has."""
        self.identities.append(identity)
        assert_distinct(self.identities)
        return len(self.identities)

    def leave(self, identity: str) -> None:
        """The lease is over: its device may be leased again."""
        self.identities.remove(identity)


def prove(command: list[str], mask: dict[str, str]) -> dict[str, Any]:
    """Run the proof in a fresh process under the mask; the identity that it prints."""
    done = subprocess.run(command, env=_environment(mask), capture_output=True, text=True, timeout=_PROVE_S)
    if done.returncode:
        raise PoolError(f"the proof of a device failed: {done.stderr.strip()[-300:]}")
    identity: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return identity


def _run(command: list[str], mask: dict[str, str]) -> Any:
    with tempfile.TemporaryDirectory(prefix="tuner-lease-") as folder:
        argv = [word.replace("{out}", folder) for word in command]
        done = subprocess.run(argv, env=_environment(mask), capture_output=True, text=True)
        result = Path(folder) / "result.json"
        if done.returncode not in (Exit.OK, Exit.REGRESSION) or not result.is_file():
            raise InfraError(f"{shlex.join(argv)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        read(Measurement, result)
        return json.loads(result.read_text())


def _environment(mask: dict[str, str]) -> dict[str, str]:
    """Ray's worker's environment without its masks, plus this lease's."""
    return {**{name: value for name, value in os.environ.items() if name not in MASKS}, **mask}


def _is_intel() -> bool:
    import importlib.util

    return importlib.util.find_spec("dpctl") is not None and not Path("/dev/nvidiactl").exists()


def _connect(address: str) -> int:
    try:
        import ray
    except ImportError:
        raise PoolError(f"ray is not installed (fix: {install('ray')})") from None
    if address == "local":
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    try:
        ray.init(address=address, include_dashboard=False, logging_level="warning", log_to_driver=False)
    except (ValueError, ConnectionError, RuntimeError) as error:  # no address, or nobody there
        raise PoolError(f"no Ray cluster at {address!r:.80}: {error}"[:500]) from None
    count = int(ray.cluster_resources().get("GPU", 0))
    if count < 1:
        raise PoolError("this Ray cluster has no GPU; on Intel hosts Ray counts them through dpctl (the extra `xpu`)")
    return count


def _shape(options: TuneOptions) -> str:
    p = options.problem
    if p.op == "store_kv_cache":
        return f"heads={p.N},dim={p.H}"
    if p.op == "block_fp8_linear":
        assert p.block_shape is not None
        return f"N={p.N},K={p.H},block_n={p.block_shape[0]},block_k={p.block_shape[1]}"
    text = f"E={p.E},N={p.N},H={p.H},topk={p.topk}"
    text += f",block_n={p.block_shape[0]},block_k={p.block_shape[1]}" if p.block_shape else ""
    text += f",shared={p.shared}" if p.shared else ""
    return text + (f",ep={p.ep}" if p.ep > 1 else "")


def _merged(options: TuneOptions, records: list[Measurement]) -> TuneResult:
    """One result and one set of files from the groups' records."""
    if len({(r.device.name, r.device.arch) for r in records}) != 1:
        raise PoolError("the cluster's GPUs differ: a config file is for one kind of device")
    finals = sorted((final for record in records for final in _finals(record)), key=lambda final: final.batch_size)
    first = records[0]
    counts: dict[str, int] = {}
    errors: dict[str, int] = {}
    for record in records:
        for target, source in ((counts, record.detail["counts"]), (errors, record.detail["errors"])):
            for name, value in source.items():
                target[name] = target.get(name, 0) + int(value)
    device_name = device_name_of({"device": {"kind": first.device.kind, "name": first.device.name}})
    detail = first.detail["origin"]
    origin = Origin(
        options.engine, detail["kernel_hash"], device_name, ",".join(r.device.identity for r in records),
        first.environment["triton"], first.environment, detail["candidates"],
        max(r.detail["origin"]["covered"] for r in records), first.interpreter, shlex.join(options.command),
        {"problem": options.problem.as_dict(), "effort": options.effort, "strategy": options.strategy,
         "routing": options.routing, "leases": len(records)},
        detail["kernel_files"],
    )  # fmt: skip
    files = emit_all(options.out, options.problem, finals, origin, vllm=options.vllm)
    seconds = {"leases": max(float(record.detail["wall_s"]) for record in records)}
    device: DeviceIdentity = replace(first.device, identity=origin.identity)
    return TuneResult(
        tuple(finals), Findings({}, {}), tuple(files), device, first.environment, first.interpreter, seconds, counts,
        errors, all(record.detail["complete"] for record in records), origin, failed=_failed(records),
        cut={int(size): Cut(**row) for record in records for size, row in record.detail["cut"].items()},
    )  # fmt: skip


def _failed(records: list[Measurement]) -> dict[int, str]:
    cases = [case for record in records for case in record.cases if case.status == "failed"]
    return {int(case.name.rsplit("M=", 1)[1]): case.message for case in cases}


def _finals(record: Measurement) -> list[Final]:
    out = []
    for case in record.cases:
        if case.status != "passed":
            continue
        d = case.detail
        size = int(case.name.rsplit("M=", 1)[1])
        configs = {projection: Config.of(values) for projection, values in d["configs"].items()}
        out.append(
            Final(size, configs, d["winner_us"], d["default_us"], d["winner_spread_us"], d["default_spread_us"],
                  d["kept_default"], d["verified"], (case.message,) if case.message else ())
        )  # fmt: skip
    return out
