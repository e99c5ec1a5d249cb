"""Coverage: what every (model, tp, ep, dtype) would load on every device, ranked by what tuning is worth there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moegate.configs import ConfigKey, Resolution
from moegate.configs.engines import resolve
from moegate.configs.values import Engine
from moegate.dispatch.reach import reachability
from moegate.errors import UsageError
from moegate.families import Layout
from moegate.records.findings import Finding
from orchestrator.check.gains import Gain, expected
from orchestrator.check.rules import finding

# From what needs nothing to what needs tuning most.
ORDER = ("exact", "alias", "older-triton", "newer-triton", "up-config", "default", "unreachable")


@dataclass(frozen=True)
class Model:
    """One model to cover: the path it was read from (as findings print it) and its layout."""

    shown: str
    layout: Layout


@dataclass(frozen=True)
class Ask:
    """What to cover: every combination of these."""

    devices: tuple[str, ...]
    triton: str
    engine: Engine
    tps: tuple[int, ...] = (1,)
    eps: tuple[int, ...] = (1,)
    dtypes: tuple[str | None, ...] = (None,)
    backend: str = "auto"


@dataclass(frozen=True)
class Cell:
    """One combination: what both projections resolve to, and what tuning it is expected to be worth.

    `up` and `down` are reasons of the lookup; `reachable` says whether dispatch ever gets to that lookup.
    """

    model: str
    device: str
    tp: int
    ep: int
    dtype: str
    key: ConfigKey
    up: str
    down: str
    up_file: str | None
    down_file: str | None
    reachable: bool
    why: str
    expected_gain: float | None
    gain_from: str

    @property
    def worst(self) -> str:
        """The worse of the two reasons, or `unreachable`."""
        return "unreachable" if not self.reachable else max(self.up, self.down, key=ORDER.index)


def cover(root: Path | None, models: Iterable[Model], ask: Ask, gains: tuple[Gain, ...] = ()) -> tuple[Cell, ...]:
    """Resolve every combination, the ones most worth tuning first.

    Combinations whose sizes do not divide (tp over a small intermediate size, say) are left out.
    """
    cells = [cell for model in models for cell in _model_cells(root, model, ask, gains)]
    return tuple(sorted(cells, key=_rank))


def _rank(cell: Cell) -> tuple[float, int, str, str]:
    if not cell.reachable:
        return (1.0, 0, cell.model, cell.device)
    need = ORDER.index(cell.worst)
    share = 0.0 if need == 0 else need / ORDER.index("default")
    worth = ((cell.expected_gain or 1.0) - 1.0) * share
    return (-worth, -need, cell.model, cell.device)


def _model_cells(root: Path | None, model: Model, ask: Ask, gains: tuple[Gain, ...]) -> Iterator[Cell]:
    for device in ask.devices:
        for tp in ask.tps:
            for ep in ask.eps:
                for dtype in ask.dtypes:
                    try:
                        key = model.layout.key(device, tp=tp, ep=ep, dtype=dtype, engine=ask.engine)
                    except UsageError:
                        continue
                    yield _cell(root, model, key, (tp, ep, dtype), ask, gains)


def _cell(
    root: Path | None,
    model: Model,
    key: ConfigKey,
    point: tuple[int, int, str | None],
    ask: Ask,
    gains: tuple[Gain, ...],
) -> Cell:
    up, down = _resolve(root, key, ask)
    reach = reachability(ask.engine, model.layout, key, ask.backend)
    gain, source = expected(gains, key)
    dtype = point[2] or key.dtype or model.layout.dtype
    return Cell(
        model.shown, key.device_name, point[0], point[1], dtype, key, up.reason, down.reason, up.file, down.file,
        reach.reachable, reach.why, gain, source,
    )  # fmt: skip


def _resolve(root: Path | None, key: ConfigKey, ask: Ask) -> tuple[Resolution, Resolution]:
    return (
        resolve(ask.engine, root, key, "up", triton=ask.triton),
        resolve(ask.engine, root, key, "down", triton=ask.triton),
    )


def compare_cells(head: Iterable[Cell], base: Iterable[Cell], where: str) -> Iterator[Finding]:
    """Cells that lost their configs, or resolve to other files, against the base."""
    before = {(c.model, c.device, c.tp, c.ep, c.dtype): c for c in base}
    for cell in head:
        old = before.get((cell.model, cell.device, cell.tp, cell.ep, cell.dtype))
        if old is None:
            continue
        for projection, was, now, was_file, now_file in (
            ("up", old.up, cell.up, old.up_file, cell.up_file),
            ("down", old.down, cell.down, old.down_file, cell.down_file),
        ):
            says = f"{cell.model} tp {cell.tp} ep {cell.ep} {cell.dtype} on {cell.device}, {projection}"
            if ORDER.index(now) > ORDER.index(was):
                yield finding("coverage-lost", where, 1, f"{says}: {was} ({was_file}) before, {now} now")
            elif was_file != now_file:
                yield finding("resolution-changed", where, 1, f"{says}: {was_file} before, {now_file} now")
