"""What differs between the arms: their definitions, the configurations that really ran, and the dispatch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moegate import canonical
from moegate.records import ConfigUse, Proof, RunBundle
from reports.text import DASH, clip, one_line, slug
from reports.view.joined import Joined, side_of

__all__ = ["ArmRow", "ConfigSet", "ConfigTable", "DispatchRow", "Param", "arm_rows", "config_sets", "dispatch_rows"]

# Short names that people who tune MoE kernels use; a key that is not here is shown as it is spelled.
SHORT = {
    "BLOCK_SIZE_M": "BLOCK M",
    "BLOCK_SIZE_N": "BLOCK N",
    "BLOCK_SIZE_K": "BLOCK K",
    "GROUP_SIZE_M": "GROUP M",
    "num_warps": "warps",
    "num_stages": "stages",
    "USE_TMA": "TMA",
}
# A parameter that a configuration leaves to the compiler.
UNSET = "unset"
_MOST_BATCHES, _MOST_PARAMS, _MOST_TABLES = 40, 16, 24


@dataclass(frozen=True)
class ArmRow:
    """One property of the arms; `same` when both say the same."""

    name: str
    baseline: str
    candidate: str
    same: bool


@dataclass(frozen=True)
class Param:
    """One parameter at one batch size in both arms."""

    baseline: str
    candidate: str

    @property
    def changed(self) -> bool:
        """Whether the arms differ."""
        return self.baseline != self.candidate


@dataclass(frozen=True)
class ConfigLine:
    """One batch size: all parameters in the order of the table's columns."""

    batch: str
    params: tuple[Param, ...]


@dataclass(frozen=True)
class ConfigTable:
    """One projection: parameters per batch size, and where each arm's answer came from.

    The lines are the batch sizes that both arms ran; `one_sided` names those that only one of them happened to see.
    """

    op: str
    projection: str
    columns: tuple[str, ...]
    lines: tuple[ConfigLine, ...]
    baseline_from: str
    candidate_from: str
    hidden: int
    one_sided: str

    @property
    def changed(self) -> tuple[str, ...]:
        """The batch sizes that run with another configuration."""
        return tuple(line.batch for line in self.lines if any(param.changed for param in line.params))


@dataclass(frozen=True)
class ConfigSet:
    """The configurations that a group of cells ran with; cells with equal tables share one set."""

    anchor: str
    title: str
    tables: tuple[ConfigTable, ...]
    cells: tuple[str, ...]

    @property
    def changes(self) -> int:
        """At how many batch sizes the arms ran differently, in any projection."""
        return len({batch for table in self.tables for batch in table.changed})


@dataclass(frozen=True)
class DispatchRow:
    """What a backend request became, in both arms, and the chain that was walked."""

    requested: str
    where: str
    baseline: str
    candidate: str
    chain: tuple[tuple[str, bool, str], ...]
    calls: str
    cells: int

    @property
    def same(self) -> bool:
        """Whether both arms ran the same backend."""
        return self.baseline == self.candidate


def arm_rows(bundle: RunBundle) -> tuple[tuple[str, str], tuple[ArmRow, ...]]:
    """Return the names of the two arms and what defines them, one row per property."""
    policy = bundle.plan.compare
    if policy is None:
        return ("", ""), ()
    arms = {arm.name: arm for arm in bundle.plan.arms}
    sides = (arms.get(policy.baseline), arms.get(policy.candidate))
    rows = [
        _row("configs", *(_configs(arm.configs) if arm else None for arm in sides)),
        _row("source", *((arm.source or "this checkout") if arm else None for arm in sides)),
    ]
    kernels = [_kernels(bundle, arm.name) if arm else "" for arm in sides]
    if any(kernels):
        rows.append(_row("kernels that ran", *kernels))
    for key in sorted({key for arm in sides if arm for key in arm.env}):
        rows.append(_row(key, *(arm.env.get(key, "not set") if arm else None for arm in sides)))
    return (one_line(policy.baseline, 60), one_line(policy.candidate, 60)), tuple(rows)


def _kernels(bundle: RunBundle, arm: str) -> str:
    """The hash of the kernel sources that the launches of an arm report, per engine."""
    found = {
        f"{launch.proof.engine} {launch.proof.kernel_hash[:12]}": None
        for results in bundle.measurements.values()
        for result in results
        for launch in result.launches
        if launch.arm == arm and launch.proof is not None and launch.proof.kernel_hash
    }
    return ", ".join(found)


def _configs(spelled: str) -> str:
    return {"none": "none: every lookup gives the default", "tuned": "tuned: what this run wrote"}.get(spelled, spelled)


def _row(name: str, baseline: str | None, candidate: str | None) -> ArmRow:
    left, right = one_line(baseline or DASH, 160), one_line(candidate or DASH, 160)
    return ArmRow(name, left, right, left == right)


def proofs(joined: Joined) -> tuple[Proof | None, Proof | None]:
    """Return the newest evidence of each arm of a cell (baseline, candidate)."""
    found: list[Proof | None] = [None, None]
    for launch in joined.launches:
        if launch.proof is not None and launch.void_reason is None:
            found[side_of(joined, launch)] = launch.proof
    return found[0], found[1]


def config_sets(cells: Iterable[Joined]) -> tuple[tuple[ConfigSet, ...], dict[str, str]]:
    """Return the distinct config tables of a run, most changed first, and the anchor of each cell's set."""
    members: dict[str, list[Joined]] = {}
    tables: dict[str, tuple[ConfigTable, ...]] = {}
    for joined in cells:
        if joined.cell.aa:
            continue
        base, cand = proofs(joined)
        uses = (base.configs if base else (), cand.configs if cand else ())
        if not any(uses):
            continue
        key = canonical.digest([[_content(use) for use in arm] for arm in uses])
        tables.setdefault(key, _tables(*uses))
        members.setdefault(key, []).append(joined)
    ranked = sorted(members, key=lambda key: -sum(len(table.changed) for table in tables[key]))
    sets, anchors = [], {}
    for index, key in enumerate(ranked, 1):
        anchor = f"cfg-{index}"
        title = " · ".join(_title(members[key]))
        sets.append(ConfigSet(anchor, title, tables[key], tuple(j.cell.id for j in members[key])))
        anchors.update({joined.cell.id: anchor for joined in members[key]})
    return tuple(sets), anchors


def _content(use: ConfigUse) -> list[Any]:
    return [use.op, use.projection, use.batch_size, use.reason, use.file, use.config]


def _title(members: list[Joined]) -> list[str]:
    models = sorted({joined.cell.model for joined in members if joined.cell.model})
    kinds = sorted({joined.cell.kind for joined in members})
    pools = sorted({joined.cell.pool for joined in members if joined.cell.pool})
    return [one_line(", ".join(group), 60) for group in (models, kinds, pools) if group]


def _tables(base: Iterable[ConfigUse], cand: Iterable[ConfigUse]) -> tuple[ConfigTable, ...]:
    left = {(u.op, u.projection, u.batch_size): u for u in base}
    right = {(u.op, u.projection, u.batch_size): u for u in cand}
    groups = sorted({key[:2] for key in (*left, *right)}, key=lambda key: (key[0], key[1] != "up"))[:_MOST_TABLES]
    return tuple(_table(op, projection, left, right) for op, projection in groups)


def _table(op: str, projection: str, left: Mapping[Any, ConfigUse], right: Mapping[Any, ConfigUse]) -> ConfigTable:
    seen = [{key[2] for key in side if key[:2] == (op, projection)} for side in (left, right)]
    sizes = sorted(seen[0] & seen[1] or seen[0] | seen[1])
    shown = sizes[:_MOST_BATCHES]
    uses = [(left.get((op, projection, m)), right.get((op, projection, m))) for m in shown]
    names: dict[str, None] = dict.fromkeys(SHORT)
    for pair in uses:
        for use in pair:
            names.update(dict.fromkeys(use.config if use else ()))
    present = [name for name in names if any(use is not None and name in use.config for pair in uses for use in pair)]
    columns = present[:_MOST_PARAMS]
    lines = tuple(
        ConfigLine(str(m), tuple(Param(_param(b, name), _param(c, name)) for name in columns))
        for m, (b, c) in zip(shown, uses, strict=True)
    )
    return ConfigTable(
        op=op,
        projection=projection,
        columns=tuple(SHORT.get(name, clip(name, 24)) for name in columns),
        lines=lines,
        baseline_from=_origin([b for b, _ in uses if b is not None]),
        candidate_from=_origin([c for _, c in uses if c is not None]),
        hidden=len(sizes) - len(shown),
        one_sided=", ".join(map(str, sorted((seen[0] | seen[1]) - set(sizes))[:20])),
    )


def _param(use: ConfigUse | None, name: str) -> str:
    if use is None:
        return DASH
    if name not in use.config:
        return UNSET
    raw = use.config[name]
    return {True: "on", False: "off"}[raw] if isinstance(raw, bool) else one_line(str(raw), 12)


def _origin(uses: list[ConfigUse]) -> str:
    found: dict[str, None] = {}
    for use in uses:
        where = use.file.rsplit("/", 1)[-1] if use.file else "no file"
        alias = f", as {use.alias}" if use.alias else ""
        found[f"{where} ({use.reason}{alias})"] = None
    return clip("; ".join(found), 300) or DASH


def dispatch_rows(cells: Iterable[Joined]) -> tuple[DispatchRow, ...]:
    """Return what each backend request became, per pool; rows where the arms differ come first."""
    rows: dict[tuple[str, ...], list[Any]] = {}
    for joined in cells:
        base, cand = proofs(joined)
        some = cand or base
        if some is None:
            continue
        resolved = (base.resolved_backend if base else DASH, cand.resolved_backend if cand else DASH)
        key = (some.requested_backend, joined.cell.pool or DASH, some.engine, *resolved)
        row = rows.setdefault(key, [some, {}, 0])
        row[2] += 1
        for name, number in some.calls.items():
            row[1][name] = row[1].get(name, 0) + number
    made = [_dispatch_row(key, *row) for key, row in rows.items()]
    return tuple(sorted(made, key=lambda row: (row.same, row.requested, row.where)))


def _dispatch_row(key: tuple[str, ...], proof: Proof, calls: dict[str, int], cells: int) -> DispatchRow:
    chain = _steps(proof.chain)
    said = ", ".join(f"{one_line(name, 30)} {number:,}" for name, number in sorted(calls.items())[:6])
    return DispatchRow(key[0], f"{key[1]}, {key[2]}", key[3], key[4], chain, said, cells)


def _steps(chain: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, bool, str], ...]:
    """The chain that was walked: (backends, chosen, why); what was passed over for one reason stands together."""
    steps: dict[tuple[bool, str], list[str]] = {}
    for step in chain:
        key = bool(step.get("chosen")), one_line(str(step.get("why", "")), 160)
        steps.setdefault(key, []).append(one_line(str(step.get("backend", "?")), 40))
    shown = sorted(steps.items(), key=lambda item: item[0][0])[-12:]
    return tuple((clip(", ".join(names), 300), chosen, why) for (chosen, why), names in shown)


def anchor_for(cell_id: str) -> str:
    """Return the permalink anchor of a cell."""
    return f"c-{slug(cell_id)}"
