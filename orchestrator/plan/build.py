"""Build the plan: every cell with its id, its arms, what it needs and why it is there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NoReturn

from moegate import canonical
from moegate.errors import UsageError
from moegate.paths import is_file
from moegate.records import ComparePolicy, GatePolicy, ModelSpec, Plan, PlannedCell, PoolSpec, QuarantineRule
from moegate.version import own_version
from orchestrator.matrix import Matrix
from orchestrator.matrix.tree import Mapping_, find
from orchestrator.plan import resolve
from orchestrator.plan.estimate import History, estimated
from orchestrator.plan.expand import Point, expand
from orchestrator.plan.reach import Reach, reach
from orchestrator.plan.warn import warnings

__all__ = ["build", "cell_id", "select"]

Place = tuple[str | int, ...]


def build(matrix: Matrix, *, only: Iterable[str] = (), history: History | None = None) -> Plan:
    """Expand a matrix into a plan.

    Args:
        matrix: as loaded.
        only: globs of labels or ids; cells that a chosen cell needs are kept too. None chosen is an error.
        history: what cells took in earlier runs, for the estimates.

    Raises:
        UsageError: a reference that leads nowhere or a combination that cannot be, with its line.
    """
    known = history or History({})
    builder = _Builder(matrix)
    cells = [_estimated(builder, cell, known) for cell in builder.cells()]
    cells = _only(cells, tuple(only))
    policy = builder.gate
    _check_globs(matrix, policy, cells if not only else builder.all_cells)
    plan = Plan(
        name=matrix.spec.name,
        matrix=str(matrix.path),
        matrix_digest=matrix.digest,
        created=datetime.now(UTC).isoformat(timespec="microseconds"),  # a run is known by it: two may start at once
        version=own_version(),
        cells=tuple(cells),
        pools=builder.pools,
        models=builder.models,
        arms=builder.arms,
        images=builder.images,
        compare=builder.compare,
        gate=policy,
        seed=matrix.spec.seed,
    )
    changed = [f"not as {matrix.path.name} says: {setting}" for setting in matrix.settings]
    return replace(plan, warnings=(*changed, *warnings(plan)))


def cell_id(kind: str, axes: dict[str, Any], arms: tuple[str, ...]) -> str:
    """The stable id: the kind, and 12 hex digits over kind, axis values and arm names."""
    return f"{kind}-{canonical.digest({'kind': kind, 'axes': axes, 'arms': list(arms)})[:12]}"


def select(cells: Iterable[PlannedCell], globs: tuple[str, ...]) -> list[PlannedCell]:
    """The cells that a glob means, with all cells that they need, in plan order."""
    everything = list(cells)
    by_id = {cell.id: cell for cell in everything}
    keep: set[str] = set()
    todo = [cell.id for cell in everything if any(cell.matches(glob) for glob in globs)]
    while todo:
        name = todo.pop()
        if name not in keep:
            keep.add(name)
            todo.extend(by_id[name].needs)
    return [cell for cell in everything if cell.id in keep]


def _only(cells: list[PlannedCell], globs: tuple[str, ...]) -> list[PlannedCell]:
    if not globs:
        return cells
    chosen = select(cells, globs)
    if not chosen:
        sample = ", ".join(cell.label for cell in cells[:3])
        raise UsageError(
            f"no cell matches {', '.join(globs)}", field="--only", fix=f"a glob of labels such as {sample}"
        )
    return chosen


def _check_globs(matrix: Matrix, gate: GatePolicy, cells: list[PlannedCell]) -> None:
    rows: list[tuple[Place, str]] = [(("gate", "required", i), glob) for i, glob in enumerate(gate.required)]
    rows += [(("gate", "quarantine", i, "cells"), rule.cells) for i, rule in enumerate(gate.quarantine)]
    for place, glob in rows:
        if not any(cell.matches(glob) for cell in cells):
            matrix.fail(place, f"{glob} matches no cell", "`orchestrator plan` lists the labels")


def _estimated(builder: _Builder, cell: PlannedCell, history: History) -> PlannedCell:
    pool = builder.pool_by_name.get(cell.pool or "")
    return estimated(cell, builder.compare, pool.device if pool else "cpu", history)


class _Builder:
    """Resolves the names of one matrix once and makes its cells."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self.images = resolve.images(matrix)
        self.pools = resolve.pools(matrix)
        self.models = resolve.models(matrix)
        self.arms = resolve.arms(matrix)
        self.pool_by_name: dict[str, PoolSpec] = {pool.name: pool for pool in self.pools}
        self.model_by_name: dict[str, ModelSpec] = {model.name: model for model in self.models}
        self.arm_by_name = {arm.name: arm for arm in self.arms}
        self.image_env = {image.name: image.env for image in self.images}
        self.compare = self._compare()
        self.gate = _gate(matrix)
        self.all_cells: list[PlannedCell] = []
        self._reach_cache: dict[str, Reach] = {}

    def cells(self) -> list[PlannedCell]:
        """All cells, in the order of the matrix, with their needs filled in."""
        made: dict[str, tuple[PlannedCell, Point]] = {}
        for point in expand(self.matrix, self.model_by_name):
            self._check_names(point)
            cell = self._cell(point)
            if cell.id in made:
                first = made[cell.id][1].place
                self.matrix.fail(
                    point.place, f"makes the cell {cell.label} a second time (first by {first[0]}[{first[1]}])",
                    "remove one of the two, or exclude the point",
                )  # fmt: skip
            made[cell.id] = (cell, point)
        if not made:
            self.matrix.fail(("cells",), "makes no cell", "every point is excluded; keep one")
        tunes = [cell for cell, _ in made.values() if cell.kind == "tune"]
        self.all_cells = [replace(cell, needs=self._needs(cell, point, tunes)) for cell, point in made.values()]
        return self.all_cells

    def _compare(self) -> ComparePolicy | None:
        spec = self.matrix.spec.compare
        if spec is None:
            return None
        for side in ("baseline", "candidate"):
            name = getattr(spec, side)
            if name not in self.arm_by_name:
                known = ", ".join(self.arm_by_name) or "none is declared"
                self.matrix.fail(("compare", side), f"no arm is called {name}", f"one of arms: {known}")
        if spec.futility is not None and spec.futility > spec.confirm:
            self.matrix.fail(
                ("compare", "futility"),
                f"{spec.futility} is more than confirm {spec.confirm}",
                "a smaller number, or none",
            )
        return ComparePolicy(**spec.model_dump())

    def _check_names(self, point: Point) -> None:
        tables = (("pools", "pool", self.pool_by_name), ("models", "model", self.model_by_name))
        for key, axis, known in tables:
            name = point.axes.get(axis)
            if name is not None and name not in known:
                place = self._written(point, key)
                names = ", ".join(known) or "none is declared"
                self.matrix.fail(place, f"no {axis} is called {name}", f"one of {key}: {names}")
        samples = point.axes.get("samples")
        if samples is not None:
            place = self._written(point, "samples")
            path = resolve.path_in_repository(self.matrix, place, samples)
            if not is_file(path):
                self.matrix.fail(place, f"{samples} does not exist", "a .jsonl file of samples")
            point.axes["samples"] = str(path)

    def _written(self, point: Point, key: str) -> Place:
        """Where a key of this point was written: on the cell, or in the defaults that it inherited."""
        own = (*point.place, key)
        entry_line, own_line = self.matrix.line(point.place), self.matrix.line(own)
        written = own_line != entry_line or key in _keys(self.matrix, point.place)
        return own if written else ("defaults", key)

    def _cell(self, point: Point) -> PlannedCell:
        kind, spec = point.kind, point.spec
        arms, aa = self._arms(point) if kind.arms else ((), False)
        ident = cell_id(kind.name, self._identity(point), arms)
        answer = self._reach(point, arms) if kind.arms else None
        control = answer is not None and not answer.reachable and not aa
        return PlannedCell(
            id=ident,
            kind=kind.name,
            label=point.label + ("/aa" if aa else ""),
            axes=point.axes,
            why=self._why(point, arms, answer, aa),
            timeout_s=spec.timeout or kind.timeout_s,
            arms=arms,
            pool=point.axes.get("pool"),
            model=point.axes.get("model"),
            family="control" if control else kind.family,
            control=control,
            aa=aa,
            retries=1 if spec.retries is None else spec.retries,
        )

    def _identity(self, point: Point) -> dict[str, Any]:
        """The axes as the id sees them: a path by its place in the repository, so that ids agree between checkouts."""
        if "samples" not in point.axes:
            return point.axes
        return {**point.axes, "samples": getattr(point.spec, "samples", "")}

    def _arms(self, point: Point) -> tuple[tuple[str, ...], bool]:
        aa = bool(getattr(point.spec, "aa", False))
        named = getattr(point.spec, "arms", None)
        if self.compare is None:
            self.matrix.fail(
                point.place, f"{point.kind.name} compares two arms, and there is no `compare`",
                "write `compare: {baseline: ..., candidate: ...}`",
            )  # fmt: skip
        both = (self.compare.baseline, self.compare.candidate)
        place = self._written(point, "arms")
        if named is not None:
            for name in named:
                if name not in self.arm_by_name:
                    self.matrix.fail(place, f"no arm is called {name}", f"one of arms: {', '.join(self.arm_by_name)}")
            if set(named) != set(both):
                self.matrix.fail(place, "must be the two arms of `compare`", f"write [{both[0]}, {both[1]}]")
        if aa:
            return (both[0], both[0]), True
        if both[0] == both[1]:
            self.matrix.fail(
                ("compare", "candidate"), "is the baseline itself", "another arm, or `aa: true` on the cell"
            )
        return both, False

    def _reach(self, point: Point, arms: tuple[str, ...]) -> Reach:
        pool = self.pool_by_name[point.axes["pool"]]
        env = {**self.image_env.get(pool.image or "", {}), **self.arm_by_name[arms[0]].env}
        names = ("moe_runner_backend", "engine", "op", "dtype")
        key = canonical.dumps([pool.name, env, [point.axes.get(name) for name in names]])
        answer = self._reach_cache.get(key)
        if answer is None:
            answer = self._reach_cache[key] = reach(pool, point.axes, env)
        if answer.refused:
            message, _, fix = answer.refused.partition(" (fix: ")
            self.matrix.fail(self._written(point, "moe_runner_backend"), message, fix.rstrip(")"))
        return answer

    def _needs(self, cell: PlannedCell, point: Point, tunes: list[PlannedCell]) -> tuple[str, ...]:
        """The tune cell whose output a `tuned` arm reads: exactly one of the same pool, model, engine, dtype and op."""
        if not any(self.arm_by_name[name].configs == "tuned" for name in cell.arms):
            return ()
        names = ("pool", "model", "engine", "dtype")
        op = cell.axes.get("op", "fused_experts")
        same = [
            tune for tune in tunes
            if tune.axes["op"] == op and all(tune.axes.get(name) == cell.axes.get(name) for name in names)
        ]  # fmt: skip
        if len(same) != 1:
            self._no_single_tune(cell, point, names, len(same))
        return (same[0].id,)

    def _no_single_tune(self, cell: PlannedCell, point: Point, names: tuple[str, ...], found: int) -> NoReturn:
        what = ", ".join(str(cell.axes.get(name)) for name in names)
        problem = f"{found} tune cells" if found else "no tune cell"
        self.matrix.fail(
            point.place, f"the arm with `configs: tuned` needs one tune cell for {what}; there is {problem}",
            "keep one of them" if found else "add `- kind: tune` with the same pool, model, engine and dtype",
        )  # fmt: skip

    def _why(self, point: Point, arms: tuple[str, ...], answer: Reach | None, aa: bool) -> str:
        if answer is None:
            texts = {
                "check": "names, pairs, values and reachability of the configs, without a device",
                "kernel-test": "an operator must agree with its float32 twin before it is timed",
                "tune": "writes the configs of the `tuned` arm",
            }
            return texts.get(point.kind.name, "")
        if aa:
            return f"A/A: {arms[0]} against itself shows the noise"
        what = f"{arms[1]} against {arms[0]}: {answer.why}"
        return what if answer.reachable else f"negative control: {answer.why}; tuning must not move it"


def _keys(matrix: Matrix, place: Place) -> frozenset[str]:
    node = find(matrix.tree, place)
    return frozenset(node.items) if isinstance(node, Mapping_) else frozenset()


def _gate(matrix: Matrix) -> GatePolicy:
    spec = matrix.spec.gate
    pools = matrix.spec.pools
    for key in spec.tiers:
        pool, slash, backend = key.partition("/")
        if not slash or not backend or pool not in pools:
            matrix.fail(
                ("gate", "tiers", key), "is not pool/backend", f"one of pools {', '.join(pools)}, a slash, a backend"
            )
    return GatePolicy(
        metric={str(kind): name for kind, name in spec.metric.items()},
        margin=spec.margin,
        q=spec.q,
        tolerance=spec.tolerance,
        inconclusive=spec.inconclusive,
        required=tuple(spec.required),
        budget_s=spec.budget,
        tiers=dict(spec.tiers),
        quarantine=tuple(QuarantineRule(**rule.model_dump()) for rule in spec.quarantine),
    )
