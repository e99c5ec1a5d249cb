"""One tuning from the problem to the files: race, finals, verification, emission; all of it resumable."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from moegate import canonical, devices
from moegate.devices import normalise
from moegate.errors import InfraError
from moegate.journal import Journal
from moegate.records import DeviceIdentity, from_json
from tuner.child.client import ChildSpec
from tuner.config import Config
from tuner.defaults import default_for
from tuner.effort import Effort, effort
from tuner.emit import Origin, emit_all, ensure_places
from tuner.finals import Final, Finals
from tuner.journaled import PURPOSE, Journaled, error_counts, most_frequent
from tuner.live import Live, LiveOptions, Strike, pool_size
from tuner.places import CACHE, CHILDREN, JOURNAL, ensure_workplace
from tuner.prior import load as load_prior
from tuner.prior import own_tiles
from tuner.problem import Problem, Projection
from tuner.progress import Progress, Watched
from tuner.spaces import Space, space_for
from tuner.strategies import strategy
from tuner.strategies.base import Arena, Cut, Findings, Strategy, Task

__all__ = ["TuneOptions", "TuneResult", "device_name_of", "gain_words", "tune"]

CODEGEN_PREFIXES = ("TRITON_", "IGC_", "SYCL_", "LLVM_", "DISABLE_LLVM_OPT")
_NOT_CODEGEN = ("TRITON_CACHE_DIR", "TRITON_HOME")


@dataclass(frozen=True)
class TuneOptions:
    """What the command line says.

    `finals` off ends with the search and writes no config file; `seeds` are configs that every batch size tries;
    `searcher` takes the place of the strategy that is named.
    """

    problem: Problem
    batch_sizes: tuple[int, ...]
    out: Path
    effort: str = "full"
    engine: str = "moegate"
    strategy: str = "racing"
    budget_s: float | None = None
    prior: bool = True
    without: tuple[str, ...] = ()
    seed: int = 0
    routing: str = "uniform"
    python: str = sys.executable
    workers: int | None = None
    command: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv))
    quiet: bool = False
    vllm: bool = False
    keep_cache: bool = False
    finals: bool = True
    seeds: tuple[Config, ...] = ()
    searcher: Strategy | None = None


@dataclass(frozen=True)
class TuneResult:
    """What came out.

    `files` are all files written; `seconds` the wall time of each stage, `spent` what the measuring and the finals
    child and the wait for compiles took of it. `compiled_late` names kernels that the measuring child had to compile,
    `failed` batch sizes at which no config runs and computes the right thing, with the reason, `cut` those whose search
    the budget ended.
    """

    finals: tuple[Final, ...]
    findings: Findings
    files: tuple[Path, ...]
    device: DeviceIdentity
    versions: dict[str, str]
    interpreter: bool
    seconds: dict[str, float]
    counts: dict[str, int]
    errors: dict[str, int]
    complete: bool
    origin: Origin
    spent: dict[str, float] = field(default_factory=dict)
    compiled_late: tuple[str, ...] = ()
    failed: dict[int, str] = field(default_factory=dict)
    cut: dict[int, Cut] = field(default_factory=dict)


def device_name_of(hello: dict[str, Any]) -> str:
    """The device_name field of config files for the device a child reports (`cpu` under the interpreter)."""
    return "cpu" if hello["device"]["kind"] == "cpu" else normalise(hello["device"]["name"])


def tune(options: TuneOptions) -> TuneResult:
    """Run a tuning, or go on with one that was interrupted in the same folder.

    Raises:
        UsageError: the problem cannot be tuned here, or its files cannot be written.
        InfraError: no device, or children that do not start.
    """
    clock = _Clock()
    ensure_workplace(options.out)
    if options.finals:
        ensure_places(options.out, options.problem, vllm=options.vllm)
    spec = _spec(options)
    progress = Progress(4 * len(options.batch_sizes), quiet=options.quiet)
    progress.say(f"starting: {options.problem.op} {options.problem.dtype}, {options.effort}, in {options.out}")
    with Journal.open(options.out / JOURNAL, purpose=PURPOSE, lazy=True) as journal:
        live_options = _live_options(options, spec)
        finals = Finals(spec, options.problem, live_options, journal)
        live: Live | None = None
        try:
            if options.finals:
                finals.warm()
            live = _live(options, spec, live_options, journal)
            setting = _Setting(options, live)
            if options.finals:
                ensure_places(
                    options.out, options.problem, triton=setting.triton, device_name=setting.device_name,
                    vllm=options.vllm,
                )  # fmt: skip
            finals.enter(setting.digest)
            live.hold = finals.settle
            runner = Journaled(live, journal, setting.digest)
            live.strikes.update(runner.blocked())
            setting.note(journal)
            clock.mark("start")
            progress.say(setting.words())
            searcher = options.searcher or strategy(options.strategy)
            findings = searcher.tune(setting.task(progress, clock), Watched(runner, progress))
            live.close()
            clock.mark("search")
            why = partial(most_frequent, journal, setting.digest)
            played, failed = _play(finals, findings, setting, progress, why) if options.finals else ([], {})
            clock.mark("finals")
            progress.end()
        finally:
            if live is not None:
                live.close()
            finals.close()
        origin = setting.origin(findings)
        files = emit_all(options.out, options.problem, played, origin, vllm=options.vllm) if played else []
        journal.append("emitted", files=[str(path.relative_to(options.out)) for path in files])
        clock.mark("emit")
        counts = _counts(findings, runner, live) | {"finals_compiled_late": len(finals.compiled_late)}
        spent = {name: round(value, 2) for name, value in live.spent.items()}
        spent |= {f"finals {name}": round(value, 2) for name, value in finals.spent.items()}
        errors = error_counts(journal)
    if not options.keep_cache:
        shutil.rmtree(options.out / CACHE, ignore_errors=True)
    shutil.rmtree(options.out / CHILDREN / "packages", ignore_errors=True)
    return TuneResult(
        tuple(played), findings, tuple(files), setting.identity, dict(live.hello["versions"]), setting.interpreted,
        clock.seconds, counts, errors, findings.complete, origin, spent, tuple(live.compiled_late), failed,
        findings.cut,
    )  # fmt: skip


def _counts(findings: Findings, runner: Journaled, live: Live) -> dict[str, int]:
    """What the tuning did, in numbers."""
    pool = live.pool
    compiles = {} if pool is None else {
        "compiled": pool.count, "binaries": pool.binaries(), "compile_cpu_s": round(pool.seconds),
        "slowest_compile_ms": round(pool.slowest * 1e3),
    }  # fmt: skip
    return {
        "evaluations": findings.evaluations,
        "measured": runner.measured,
        "reused": runner.reused,
        "compiled": 0,
        "binaries": 0,
        **compiles,
        "compiled_late": len(live.compiled_late),
        "child_starts": live.worker.starts,
        "parent_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def _play(
    finals: Finals, findings: Findings, setting: _Setting, progress: Progress, why: Callable[[int], str]
) -> tuple[list[Final], dict[int, str]]:
    """The finals of all batch sizes: what came out, and why nothing did; `why` is what the search met most often."""
    played = []
    failed = {
        size: f"nothing runs here, mostly for {reason}" if (reason := why(size)) else "nothing runs here"
        for size in setting.options.batch_sizes
        if size not in findings.choices
    }
    for size in sorted(findings.choices):
        pair: dict[Projection, Config] = dict.fromkeys(setting.options.problem.projections, setting.default(size))
        try:
            final = finals.play(findings.choices[size], pair, setting.effort.final_rounds)
        except InfraError as error:
            failed[size] = str(error)
            progress.step(f"M={size}: {error}")
            continue
        played.append(final)
        kept = "the default stays" if final.kept_default else f"{final.gain:.2f}x as fast as the default"
        progress.step(f"M={size}: {final.winner_us:.1f} us, {kept}, verified")
    if not played:
        reasons = "; ".join(dict.fromkeys(failed.values()))
        raise InfraError(f"no batch size has a config that runs and computes the right thing: {reasons}"[:800])
    return played, failed


def _spec(options: TuneOptions) -> ChildSpec:
    env = {"TRITON_CACHE_DIR": str((options.out / CACHE).resolve()), **interpreter_env()}
    return ChildSpec((options.out / CHILDREN).resolve(), options.python, env)


def interpreter_env() -> dict[str, str]:
    """What a child needs on a machine without a GPU: Triton's interpreter. Set for children, never for this process."""
    if os.environ.get("TRITON_INTERPRET") == "1" or not _accelerator():
        return {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": os.environ.get("TRITON_DEFAULT_FP_FUSION", "1")}
    return {}


def _accelerator() -> bool:
    """Whether this host has a device node of any vendor's driver; asking torch would start it in this process."""
    nodes = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri", "/dev/dxg")
    return any(Path(node).exists() for node in nodes)


def _live_options(options: TuneOptions, spec: ChildSpec) -> LiveOptions:
    interpreted = "TRITON_INTERPRET" in spec.env
    return LiveOptions(
        options.engine, options.seed, 1 if interpreted else 5, options.routing, not interpreted,
        0 if interpreted else (options.workers or pool_size()), 60.0 if interpreted else 12.0,
    )  # fmt: skip


def _live(options: TuneOptions, spec: ChildSpec, live_options: LiveOptions, journal: Journal) -> Live:
    def struck(strike: Strike) -> None:
        journal.append(
            "strike", env=live.environment, projection=strike.unit.projection, size=strike.unit.batch_size,
            config=strike.unit.config.as_dict(), error=strike.kind, reason=strike.reason,
        )  # fmt: skip

    live = Live(spec, options.problem, live_options, struck, options.batch_sizes)
    return live


class _Setting:
    """Everything that the device's first answers decide."""

    def __init__(self, options: TuneOptions, live: Live) -> None:
        self.options, self.live_options = options, live.options
        self.hello = live.hello
        self.interpreted = bool(live.hello["interpreter"])
        self.identity = from_json(DeviceIdentity, live.hello["device"])
        self.device_name = device_name_of(live.hello)
        self.vendor = devices.vendor_by(live.hello["device"]["kind"], live.hello["device"]["name"])
        self.effort: Effort = effort(options.effort, interpreted=self.interpreted)
        self.space: Space = space_for(options.problem.op, self.vendor)
        self.triton = str(self.hello["versions"]["triton"])
        self.kernel_hash = str(self.hello["kernel"]["kernel_hash"])
        self.descriptors_first = bool(self.hello["kernel"]["descriptors_first"])
        self.environment = {
            **live.hello["versions"],
            **codegen_variables(os.environ),
            "platform": live.hello["platform"],
        }
        self.digest = canonical.digest(
            [options.problem.as_dict(), options.engine, self.kernel_hash, self.environment, self.identity.name,
             self.identity.identity, options.routing, options.seed]
        )[:16]  # fmt: skip
        live.environment = self.digest
        p = options.problem
        ours = options.engine == "moegate" and p.op == "fused_experts" and self.vendor == "nvidia"  # measured there
        self.own = own_tiles(p.file_dtype, p.block_shape) if ours else ()
        blocks = self.space.axis("BLOCK_SIZE_M")
        if live.pool is not None:
            sizes = {config.block_m for own in self.own for config in own.configs}
            sizes |= set(map(int, blocks.values)) if blocks is not None else set()
            live.pool.helpers((0, *sorted(sizes)))

    def words(self) -> str:
        """What is searched, and where, for a person who waits for the first answer."""
        slow = "Triton's interpreter (slow: up to minutes for a timing of a real model's shape)"
        where = slow if self.interpreted else self.identity.name
        sizes = ",".join(map(str, self.options.batch_sizes))
        return f"searching the configs of M={sizes} on {where}"

    def default(self, size: int) -> Config:
        """The config of one batch size that runs without a file."""
        own = self.hello["kernel"]["defaults"].get(str(size))
        return Config.of(own) if own else default_for(self.options.problem, self.vendor, self.device_name, size)

    def note(self, journal: Journal) -> None:
        """Write down once what the outcomes of this environment were measured on."""
        if any(entry.data["env"] == self.digest for entry in journal.of("environment")):
            return
        journal.append(
            "environment", env=self.digest, problem=self.options.problem.as_dict(), engine=self.options.engine,
            kernel_hash=self.kernel_hash, environment=self.environment, device=self.hello["device"],
            vendor=self.vendor, device_name=self.device_name, descriptors_first=self.descriptors_first,
            command=list(self.options.command),
        )  # fmt: skip

    def task(self, progress: Progress, clock: _Clock) -> Task:
        """The search task."""
        budget = self.options.budget_s
        prior = load_prior().without(*self.options.without) if self.options.prior else None

        def report(stage: str, size: int, arena: Arena | None) -> None:
            told = "nothing runs" if arena is None else gain_words(arena, self.default(size))
            progress.step(f"{stage} M={size}: {told}")

        # The finals and verification take about as long as a sixth of the search: leave them room.
        share = 0.8 if self.options.finals else 1.0
        late: Callable[[], bool] = (lambda: clock.elapsed() > share * budget) if budget is not None else (lambda: False)
        return Task(
            self.options.problem, self.options.batch_sizes, self.space, self.effort, self.default, prior,
            self.options.seed, report, late, self.options.seeds, descriptors_first=self.descriptors_first,
            own=self.own,
        )  # fmt: skip

    def origin(self, findings: Findings) -> Origin:
        """Provenance of the files."""
        p = self.options.problem
        covered = len({(q, c) for arena in findings.arenas.values() for q, c in [*arena.samples, *arena.errors]})
        return Origin(
            self.options.engine, self.kernel_hash, self.device_name, self.identity.identity,
            self.triton, self.environment, self.space.size(p) * len(p.projections), covered,
            self.interpreted, shlex.join(self.options.command),
            {"problem": p.as_dict(), "effort": self.options.effort, "strategy": self.options.strategy,
             "routing": self.options.routing, "complete": findings.complete, "evaluations": findings.evaluations},
            dict(self.hello["kernel"]["kernel_files"]),
        )  # fmt: skip


def gain_words(arena: Arena, default: Config) -> str:
    """The best of a batch size so far, and what it gains over the default where both ran and are not the same."""
    best = arena.joint()
    if best is None:
        return "nothing runs"
    found = f"best {best[0]:.1f} us"
    if all(config == default for config in best[1].values()):
        return f"{found}, the default"
    times = [arena.time(projection, default) for projection in arena.projections]
    base = sum(time for time in times if time is not None)
    return f"{found}, {base / best[0]:.2f}x as fast as the default" if None not in times else found


def codegen_variables(environ: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """The variables that change generated code, as they are set."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if name.startswith(CODEGEN_PREFIXES) and name not in _NOT_CODEGEN
    }


class _Clock:
    """Wall time by stage."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def mark(self, stage: str) -> None:
        """The stage that ends now."""
        now = time.monotonic()
        self.seconds[stage] = round(now - self._last, 2)
        self._last = now
