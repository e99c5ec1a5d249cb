"""Replay: a recorded sweep answers instead of a device, so that strategies are compared on any machine.

Two formats are read: our own journal (`purpose: tune`), and a gzipped JSON of rows {"meta", "records"} as other
people's exhaustive sweeps can be brought into: `meta.fields` names the columns, a row has a time or an error.
"""

from __future__ import annotations

import gzip
import io
import math
import statistics
import tempfile
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moegate.canonical import loads_json, read_file
from moegate.errors import RecordError, UsageError
from moegate.journal import Entry
from moegate.journal import read as read_journal
from tuner.config import Config
from tuner.defaults import VENDORS, default_for
from tuner.effort import EFFORTS, Effort
from tuner.journaled import PURPOSE, outcome_of
from tuner.prior import OwnTiles, Prior, own_tiles
from tuner.problem import SHORT_DTYPES, Problem, Projection
from tuner.spaces import Axis, Space
from tuner.strategies.base import ERRORS, Arena, ErrorClass, Findings, Outcome, Request, Strategy, Task, Unit

__all__ = ["Recorded", "Replay", "Row", "Score", "load", "rows_of", "score", "task_of"]

_GZIP = b"\x1f\x8b"
_MAX_BYTES = 256 << 20
_AXES = ("num_stages", "BLOCK_SIZE_M", "BLOCK_SIZE_K", "BLOCK_SIZE_N", "num_warps")
_REASONS: dict[str, ErrorClass] = {"shared": "over-shared", "OutOfResources": "over-shared"}


@dataclass(frozen=True)
class Recorded:
    """A recorded sweep: the time in microseconds, or the error class, of every unit that was visited."""

    problem: Problem
    vendor: str
    device_name: str
    times: dict[Unit, float]
    errors: dict[Unit, ErrorClass]
    projections: tuple[Projection, ...]
    sizes: tuple[int, ...]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def visited(self) -> int:
        """Units that the sweep visited."""
        return len(self.times) + len(self.errors)

    def space(self) -> Space:
        """The space that the records span, with GROUP_SIZE_M refined and USE_TMA a variant where they were swept.

        Without what lies beyond the space (`own`).
        """
        outside = {config for entry in self.own() for config in entry.configs}
        units = [unit for unit in (*self.times, *self.errors) if unit.config not in outside]
        seen: dict[str, set[Any]] = defaultdict(set)
        for unit in units:
            for name, value in unit.config.items:
                seen[name].add(value)
        axes = [Axis(name, tuple(sorted(seen[name]))) for name in _AXES if name in seen]
        rest = [name for name in sorted(seen) if name not in _AXES and name != "USE_TMA"]
        axes += [Axis(name, tuple(sorted(seen[name])), "refine") for name in rest]
        if True in seen.get("USE_TMA", ()):
            axes.append(Axis("USE_TMA", (False, True), "variant"))
        return Space(self.problem.op, self.vendor, tuple(axes), ("group-divides",), "recorded")

    def own(self) -> tuple[OwnTiles, ...]:
        """What was recorded of our own kernels beyond the space."""
        recorded = {unit.config for unit in (*self.times, *self.errors)}
        known = own_tiles(self.problem.file_dtype, self.problem.block_shape)
        return tuple(replace(entry, configs=entry.among(recorded)) for entry in known)

    def best(self, size: int) -> float:
        """The best summed time of one batch size."""
        found = self.arena(size).joint()
        if found is None:
            raise RecordError(f"the recording holds no working config at batch size {size}")
        return found[0]

    def arena(self, size: int) -> Arena:
        """Everything recorded about one batch size."""
        arena = Arena(size, self.projections)
        arena.add(Outcome(unit, 0, (us,)) for unit, us in self.times.items() if unit.batch_size == size)
        return arena


class Replay:
    """Answers requests from a recording. A unit that was never visited is an error, as a config that does not exist.

    `delay_s` makes it take time, for tests that interrupt it.
    """

    def __init__(self, recorded: Recorded, delay_s: float = 0.0) -> None:
        self.recorded, self._delay = recorded, delay_s
        self._queue: deque[Request] = deque()

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests on."""
        self._queue.extend(requests)

    def next(self) -> Outcome:
        """The recorded time of the request that waits longest, as often as it was asked for."""
        return self._one(self._queue.popleft())

    def cancel(self) -> None:
        """Forget what is not answered."""
        self._queue.clear()

    def _one(self, request: Request) -> Outcome:
        if self._delay:
            time.sleep(self._delay)
        us = self.recorded.times.get(request.unit)
        if us is not None:
            return Outcome(request.unit, request.rung, (us,) * request.reps)
        error = self.recorded.errors.get(request.unit, "exception")
        return Outcome(request.unit, request.rung, error=error, reason="as recorded")


@dataclass(frozen=True)
class Row:
    """How one batch size came out. Regret is a fraction: 0.01 is 1 % slower than the best recorded."""

    size: int
    chosen_us: float
    best_us: float
    asked: int

    @property
    def regret(self) -> float:
        """Chosen over best, minus one."""
        return self.chosen_us / self.best_us - 1


@dataclass(frozen=True)
class Score:
    """How a strategy did on a recording."""

    rows: tuple[Row, ...]
    evaluations: int
    visited: int

    @property
    def mean(self) -> float:
        """Mean regret."""
        return statistics.fmean(row.regret for row in self.rows)

    @property
    def worst(self) -> float:
        """Worst regret."""
        return max(row.regret for row in self.rows)

    @property
    def share(self) -> float:
        """Evaluations over those of the recorded sweep."""
        return self.evaluations / self.visited


def task_of(recorded: Recorded, effort: Effort, prior: Prior | None, seed: int = 0) -> Task:
    """The search task that a recording can answer."""
    return Task(
        recorded.problem,
        recorded.sizes,
        recorded.space(),
        effort,
        lambda size: default_for(recorded.problem, recorded.vendor, recorded.device_name, size),
        prior,
        seed,
        only=recorded.projections,
        descriptors_first=bool(recorded.meta.get("descriptors_first", False)),
        own=recorded.own(),
    )


def score(recorded: Recorded, strategy: Strategy, prior: Prior | None, effort: Effort = EFFORTS["full"],
          seed: int = 0) -> Score:  # fmt: skip
    """Let a strategy search a recording and hold what it chose against the best recorded."""
    replay = Replay(recorded)
    findings = strategy.tune(task_of(recorded, effort, prior, seed), replay)
    return rows_of(recorded, replay, findings)


def rows_of(recorded: Recorded, replay: Replay, findings: Findings) -> Score:
    """What a search that is over came to, held against the recording."""
    rows = []
    for size in recorded.sizes:
        choice = findings.choices.get(size)
        arena = findings.arenas.get(size)
        asked = 0 if arena is None else len(arena.samples) + len(arena.errors)
        chosen = float("inf")
        if choice is not None:
            chosen = sum(recorded.times[Unit(size, p, choice.configs[p])] for p in recorded.projections)
        rows.append(Row(size, chosen, recorded.best(size), asked))
    return Score(tuple(rows), findings.evaluations, recorded.visited)


def load(path: Path) -> Recorded:
    """Read a recording in either format.

    Raises:
        RecordError: it is damaged or of no known format. UsageError: it cannot be opened.
    """
    try:
        text = read_file(path, _MAX_BYTES)
        head = text[:2]
        if head == _GZIP:
            with gzip.open(io.BytesIO(text)) as packed:
                text = packed.read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot be read: {error}", file=path) from None
    if len(text) > _MAX_BYTES:
        raise UsageError(f"holds more than {_MAX_BYTES} bytes", file=path)
    if text.startswith(b'{"seq":') or text.startswith(b'{"data":'):
        try:
            return _believed(path, _from_journal(path, text, packed=head == _GZIP))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise RecordError(f"is no journal of a tuning: {type(error).__name__}: {error}"[:300], file=path) from None
    return _believed(path, _from_rows(path, text))


def _believed(path: Path, recorded: Recorded) -> Recorded:
    """The recording, or RecordError where it holds what no sweep can have measured."""
    kinds: dict[str, set[type]] = defaultdict(set)
    for unit in (*recorded.times, *recorded.errors):
        if unit.projection not in recorded.problem.projections:
            raise RecordError(f"is no recorded sweep: {str(unit.projection)[:40]!r} is no projection", file=path)
        for name, value in unit.config.items:
            kinds[name].add(bool if name == "USE_TMA" and isinstance(value, int) else type(value))
    mixed = sorted(name for name, found in kinds.items() if len(found) > 1 or type(None) in found)
    wrong = next((us for us in recorded.times.values() if not (math.isfinite(us) and us > 0)), None)
    if not isinstance(recorded.vendor, str) or recorded.vendor not in VENDORS:
        what = f"its vendor is {str(recorded.vendor)[:40]!r}, not one of {', '.join(VENDORS)}"
    elif not isinstance(recorded.device_name, str):
        what = f"its device is called {str(recorded.device_name)[:40]}"
    elif mixed:
        what = f"not every {mixed[0]} is a number"
    elif wrong is not None:
        what = f"{wrong} us is no time"
    elif not recorded.times or not recorded.projections:
        what = "no config of it has a time"
    elif min(recorded.sizes) < 1:
        what = f"{min(recorded.sizes)} is no batch size"
    else:
        return recorded
    raise RecordError(f"is no recorded sweep: {what}", file=path)


def _from_rows(path: Path, text: bytes) -> Recorded:
    """Columns: M, perhaps a projection (else `up`), the parameters, the time, the error."""
    try:
        data = loads_json(text.decode())
        meta, rows = data["meta"], data["records"]
        fields = list(meta["fields"])
        first = 2 if fields[1] == "projection" else 1
        params = fields[first:-2]
        dtype = meta.get("dtype") or SHORT_DTYPES[meta.get("mode", "bf16")]
        block = (128, 128) if dtype == "fp8_w8a8" else None
        problem = Problem("fused_experts", meta["E"], meta["N"], meta["H"], meta["topk"], dtype, block)
        times: dict[Unit, float] = {}
        errors: dict[Unit, ErrorClass] = {}
        for row in rows:
            unit = Unit(int(row[0]), row[1] if first == 2 else "up", _config(params, row[first:-2]))
            if row[-2] is not None:
                times[unit] = float(row[-2])
            else:
                errors[unit] = row[-1] if row[-1] in ERRORS else "exception"
        sizes = tuple(sorted({int(row[0]) for row in rows}))
        for row in meta.get("rejected", ()):
            config = _config(params, row[:-1])
            for size in sizes:
                errors[Unit(size, "up", config)] = _REASONS.get(row[-1], "compile-failed")
        device = meta["device"] if isinstance(meta.get("device"), str) else meta.get("device", {}).get("name", "")
        device = device.replace(" ", "_")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, UsageError) as error:
        raise RecordError(f"is no recorded sweep: {type(error).__name__}: {error}"[:300], file=path) from None
    found = {unit.projection for unit in times}
    projections = tuple(p for p in problem.projections if p in found)
    return Recorded(
        problem, meta.get("vendor") or "nvidia", device, times, errors, projections, sizes, meta
    )  # fmt: skip


def _config(params: Sequence[str], values: Sequence[Any]) -> Config:
    pairs = dict(zip(params, values, strict=True))
    if "USE_TMA" in pairs and not pairs.pop("USE_TMA"):
        return Config.of(pairs)
    return Config.of({**pairs, "USE_TMA": True} if "USE_TMA" in params else pairs)


def _from_journal(path: Path, text: bytes, *, packed: bool) -> Recorded:
    entries = _unpacked(path, text) if packed else read_journal(path, purpose=PURPOSE)
    environments = [entry.data for entry in entries if entry.kind == "environment"]
    if not environments:
        raise RecordError("holds no environment: nothing was measured", file=path)
    last = environments[-1]
    samples: dict[Unit, list[float]] = defaultdict(list)
    errors: dict[Unit, ErrorClass] = {}
    for entry in entries:
        if entry.kind != "outcome" or entry.data["env"] != last["env"]:
            continue
        outcome = outcome_of(entry.data)
        if outcome.error is not None:
            errors[outcome.unit] = outcome.error
        else:
            samples[outcome.unit] += outcome.samples_us
    times = {unit: statistics.median(values) for unit, values in samples.items() if unit not in errors}
    problem = Problem.from_dict(last["problem"])
    sizes = tuple(sorted({unit.batch_size for unit in times}))
    return Recorded(
        problem, last["vendor"], last["device_name"], times, errors, problem.projections, sizes,
        {**last["environment"], "descriptors_first": bool(last.get("descriptors_first", False))},
    )  # fmt: skip


def _unpacked(path: Path, text: bytes) -> list[Entry]:
    """The journal's reader works on files: give it an unpacked one."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / path.name
        plain.write_bytes(text)
        return read_journal(plain, purpose=PURPOSE)
