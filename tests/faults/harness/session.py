"""One orchestrator as a process of its own, and what hits it from outside."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from points import Hit, arm

from moegate.entry import guard, unwind_on_termination
from moegate.records import Plan
from orchestrator.cells.base import PYTHON
from orchestrator.commands._conclude import conclude
from orchestrator.matrix import load
from orchestrator.plan import build
from orchestrator.scheduler import execute, keys

PROGRAM = Path(__file__).with_name("program.py")
MODEL = Path(__file__).parents[2] / "standin" / "model"
SLOTS = min(2, len(os.sched_getaffinity(0)))
PATIENCE_S = 240.0
ASKS = {signal.SIGINT, signal.SIGTERM}

# 60 cells of every kind: 2 check, 42 kernel-test, 2 tune, 4 kernel-bench, 8 serve, 2 accuracy.
LARGE = """\
schema: 1
name: faults
pools:
  cpu: {device: cpu, ray: none, isolation: process, slots: SLOTS}
models:
  one: {config: model, dtype: float32}
  two: {config: model, dtype: bfloat16}
arms:
  untuned: {configs: none}
  tuned: {configs: tuned}
defaults: {pools: [cpu], models: [one, two], timeout: 60s}
cells:
  - kind: check
  - kind: kernel-test
    ops: [fused_experts, topk, grouped_topk, silu_and_mul, moe_sum_reduce, moe_align_block_size, store_kv_cache,
          decode_attention, scaled_fp8_quant, per_token_group_quant_fp8, fp8_linear, block_fp8_linear]
    dtypes: [bfloat16, float16, float32]
    include:
      - {ops: [fused_experts, topk, grouped_topk, fp8_linear, block_fp8_linear, silu_and_mul], dtypes: [fp8_w8a8]}
  - kind: tune
    effort: quick
  - kind: kernel-bench
    batch_sizes: [2]
    moe_runner_backend: [auto, triton]
  - kind: serve
    moe_runner_backend: [auto, triton]
    load:
      - {requests: 2, concurrency: 2, input: 8, output: 8, seed: 1}
      - {requests: 2, concurrency: 1, input: 8, output: 8, seed: 1}
  - kind: accuracy
    samples: samples.jsonl
compare: {baseline: untuned, candidate: tuned, expect: no_regression, screen: 1, confirm: 1, futility: none}
gate: {metric: {serve: output_throughput}, margin: 1%, q: 0.5}
"""

# One cell of each kind, for hitting every single point.
SMALL = """\
schema: 1
name: faults
pools:
  cpu: {device: cpu, ray: none, isolation: process, slots: SLOTS}
models:
  one: {config: model, dtype: float32}
arms:
  untuned: {configs: none}
  tuned: {configs: tuned}
defaults: {pools: [cpu], models: [one], timeout: 60s}
cells:
  - kind: check
  - kind: kernel-test
    dtypes: [float32]
  - kind: tune
    effort: quick
  - kind: kernel-bench
    batch_sizes: [2]
  - kind: accuracy
    samples: samples.jsonl
compare: {baseline: untuned, candidate: tuned, expect: no_regression, screen: 1, confirm: 1, futility: none}
gate: {margin: 1%, q: 0.5}
"""
MATRICES = {"large": LARGE, "small": SMALL}


@dataclass(frozen=True)
class Fault:
    """What hits an orchestrator.

    `hit` acts inside, at a point; `signals` come from outside, each so many seconds after the one before.
    """

    name: str
    hit: Hit = field(default_factory=Hit)
    signals: tuple[tuple[float, int], ...] = ()


NONE = Fault("none")


@dataclass(frozen=True)
class Ended:
    """How an orchestrator ended: its exit code (negative: the signal), what it said, how many points it passed."""

    code: int
    text: str
    executed: int | None
    points: int
    names: dict[str, int]
    where: str
    wall_s: float


class Workshop:
    """A folder with a repository, and the run directories that orchestrators make of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.repository = self.folder / "repo"
        shutil.copytree(MODEL, self.repository / "model")
        (self.repository / "pyproject.toml").touch()
        (self.repository / "samples.jsonl").write_text('{"id": "a", "prompt": [1]}\n')
        os.environ["MOEGATE_LOCK_DIR"] = str(self.locks)
        os.environ.pop("MOEGATE_HISTORY", None)  # no run of this workshop may move a person's trends
        # Read once for all orchestrators, which are forks: keys hold while somebody edits the sources meanwhile.
        keys.source_revision()
        keys.host_fingerprint()
        keys._checked()

    @property
    def locks(self) -> Path:
        """The folder of device locks of this workshop alone."""
        return self.folder / "locks"

    @cache  # noqa: B019 - lives as long as the process
    def plan(self, matrix: str, slots: int) -> Plan:
        """The plan of one of MATRICES."""
        file = self.repository / f"{matrix}-{slots}.yaml"
        file.write_text(MATRICES[matrix].replace("SLOTS", str(slots)))
        return build(load(file))

    def ledger(self, run: Path) -> Path:
        """Where the children of a run write down that they were started."""
        path = run.with_name(run.name + ".ledger")
        path.mkdir(exist_ok=True)
        return path

    def orchestrate(self, run: Path, matrix: str, fault: Fault = NONE, *, slots: int = SLOTS) -> Ended:
        """Fork an orchestrator, let the fault hit it, and wait for its end."""
        plan, ledger = self.plan(matrix, slots), self.ledger(run)
        record, log = ledger / "points", ledger / "log"
        record.unlink(missing_ok=True)
        log.write_bytes(b"")  # it may be killed before it has made one
        began = time.monotonic()
        # What comes before the child can answer a signal as the command does waits for it, however slowly it starts.
        signal.pthread_sigmask(signal.SIG_BLOCK, ASKS)
        pid = os.fork()
        if pid == 0:
            _be(lambda: self._work(plan, run, ledger, fault, record), log)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS)
        code = _watch(pid, fault)
        wall_s = time.monotonic() - began
        text = log.read_text(errors="replace")
        lines = record.read_text().splitlines() if record.is_file() else []
        counted = [int(line.split()[1]) for line in lines if line.startswith("count ")]
        named = [line.split(" ", 2) for line in lines if line.startswith("name ")]
        names = {name: int(times) for _, times, name in named}
        where = next((line for line in lines if not line.startswith(("count ", "name "))), "")
        said = [line for line in text.splitlines() if line.startswith("executed ")]
        executed = int(said[-1].split()[1]) if said else None
        return Ended(code, text, executed, counted[0] if counted else 0, names, where, wall_s)

    def _work(self, plan: Plan, run: Path, ledger: Path, fault: Fault, record: Path) -> int:
        programs = {
            name: (PYTHON, "-I", "-S", str(PROGRAM), str(ledger), name) for name in ("orchestrator", "tuner", "serving")
        }
        points = arm(fault.hit, record)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS)
        session = execute(plan, run, resume=run.is_dir(), root=self.repository, programs=programs)
        print(f"executed {session.executed}", flush=True)
        code = int(session.interrupted) if session.interrupted is not None else conclude(run).exit
        signal.pthread_sigmask(signal.SIG_BLOCK, ASKS)  # it is over: from here on nothing can be asked of it
        points.finish()
        return code


def _be(work: Callable[[], int], log: Path) -> None:
    """Be an orchestrator in this forked process, and end as the command does."""
    code = 70
    try:
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        unwind_on_termination()
        guard("orchestrator", work)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 70
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _watch(pid: int, fault: Fault) -> int:
    """Send the fault's signals, and return the exit code."""
    handle = os.pidfd_open(pid)
    try:
        for pause, number in fault.signals:
            if _gone(pid, handle, pause):
                break
            os.kill(pid, number)
        if not _gone(pid, handle, PATIENCE_S):
            os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"the orchestrator did not end within {PATIENCE_S:g} s after {fault}")
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(handle)


def _gone(pid: int, handle: int, seconds: float) -> bool:
    import select

    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(seconds * 1000))
