"""One run of the check: options in, findings and tables out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moegate import devices
from moegate.configs import parse_directory, parse_name, parse_version
from moegate.configs.engines import EngineLookup, engine_of
from moegate.configs.values import Engine
from moegate.dispatch.reach import ensure_request
from moegate.errors import UsageError
from moegate.families import FAMILIES, Family
from moegate.paths import config_root, is_folder
from moegate.records.findings import CheckResult, Finding
from orchestrator.check.base import Base, open_base
from orchestrator.check.compare import compare_folders, differ
from orchestrator.check.coverage import Ask, Cell, Model, compare_cells, cover
from orchestrator.check.dispatching import accepted_changes, lock_findings, source_findings
from orchestrator.check.files import FileFacts, check_file, shown_path
from orchestrator.check.gains import Gain, read_gains
from orchestrator.check.models import model_drift, read_models, table_drift
from orchestrator.check.ops import check_op
from orchestrator.check.optable import OPS
from orchestrator.check.rules import RULES, finding, texts
from orchestrator.check.targets import Compiled, target_findings
from orchestrator.check.trees import (
    LOOKED_FOR,
    ConfigFolder,
    entries,
    files_below,
    find_folders,
    is_empty,
    moe_folder,
    op_files,
)
from orchestrator.check.upgrade import upgrade_findings
from orchestrator.check.whole import directory_finding, duplicate_findings, pair_findings, provenance_findings

_SEVERITY = ("error", "warning", "note")
LOCK = "dispatch.lock.json"
_TABLE = Path("moegate/families/table.py")


@dataclass(frozen=True)
class Options:
    """What to check. Empty `configs` means the files that we ship, and then our dispatch lock too."""

    configs: tuple[Path, ...] = ()
    engine: Engine = "moegate"
    models: tuple[Path, ...] = ()
    devices: tuple[str, ...] = ()
    tps: tuple[int, ...] = (1,)
    eps: tuple[int, ...] = (1,)
    dtypes: tuple[str | None, ...] = (None,)
    backend: str = "auto"
    base: str | None = None
    triton: str | None = None
    targets: tuple[str, ...] = ()
    source: Path | None = None
    only_new: bool = False
    start: Path = Path()


@dataclass
class _State:
    """What accumulates during one run."""

    options: Options
    engine: EngineLookup
    start: Path
    findings: list[Finding]
    compiled: Compiled
    files: int = 0
    others: Counter[str] = field(default_factory=Counter)

    def shown(self, path: Path) -> str:
        """`path` as findings print it."""
        return shown_path(path, self.start)


def run_check(options: Options) -> CheckResult:
    """Apply every rule that the options ask for.

    Raises:
        UsageError: an option, not a checked file, is wrong (exit 2).
    """
    state = _State(options, engine_of(options.engine), options.start.resolve(), [], Compiled(options.targets))
    if options.triton is not None:
        parse_version(options.triton)
    roots = options.configs or (config_root(),)
    lock = _lock_file(options)
    with ExitStack() as stack:
        base = None
        if options.base is not None:
            wanted = [*roots, *options.models, *([lock] if lock else []), *_table_file(options)]
            base = stack.enter_context(open_base(options.base, wanted, state.start))
        _ensure_found(options.configs, base)
        _ensure_asked(options, state.engine.name, roots)
        models = _models(state, base)
        cells: tuple[Cell, ...] = ()
        for root in roots:
            cells += _check_root(root, models, state, base)
        accepted: tuple[dict[str, Any], ...] = ()
        if lock is not None:
            state.findings += lock_findings(lock, state.shown)
            accepted = accepted_changes(lock, base) if base is not None else ()
    if options.source is not None:
        _, found = source_findings(options.source, None, options.base, state.shown)
        state.findings += found
    findings = tuple(sorted(state.findings, key=_order))
    return CheckResult(
        findings,
        state.files,
        texts(findings),
        tuple(_cell_json(cell) for cell in cells),
        accepted,
        {**_detail(options), "unchecked": dict(sorted(state.others.items())), "compiled": _compiled(state)},
    )


def _ensure_found(named: tuple[Path, ...], base: Base | None) -> None:
    """Refuse a folder that somebody named and that holds nothing to check: that nothing is wrong there misleads.

    One that the base has files in is none of these: they are gone, and that is a finding.

    Raises:
        UsageError: naming the folder and what was looked for.
    """
    for root in named:
        before = None if base is None else base.locate(root)
        if is_empty(root) and (before is None or not is_folder(before) or is_empty(before)):
            raise UsageError(
                f"holds no config file: looked for {LOOKED_FOR}", file=root, field="--configs",
                fix="name the folder that holds them, or a repository that does",
            )  # fmt: skip


def _ensure_asked(options: Options, engine: Engine, roots: tuple[Path, ...]) -> None:
    """Refuse devices and backends that are none: every answer about them would be `default`.

    Raises:
        UsageError: naming what may be meant.
    """
    ensure_request(engine, options.backend)
    carried: set[str] = set()
    for root in roots if options.devices else ():
        names = (parse_name(path.name) for path in files_below(root))
        carried |= {name.key.device_name for name in names if name is not None}
    for device in options.devices:
        devices.ensure_asked(device, "--devices", carried)


def _order(item: Finding) -> tuple[int, int, str, int]:
    rules = [rule.id for rule in RULES]
    return _SEVERITY.index(item.severity), rules.index(item.rule), item.file, item.line


def _detail(options: Options) -> dict[str, Any]:
    return {"engine": options.engine, "triton": options.triton, "base": options.base}


def _compiled(state: _State) -> dict[str, Any] | None:
    """What was compiled; None where nobody asked."""
    return asdict(state.compiled) if state.compiled.targets else None


def _lock_file(options: Options) -> Path | None:
    """The lock beside the configs that are checked: `kernels/dispatch.lock.json` of a checkout."""
    roots = options.configs or (config_root(),)
    candidates = [folder / LOCK for root in roots for folder in (root, root.parent)]
    return next((path for path in candidates if path.is_file()), None)


def _table_file(options: Options) -> list[Path]:
    """The family table of the checkout that is checked, if it is one of ours."""
    top = (options.configs[0] if options.configs else config_root()).resolve()
    return [parent / _TABLE for parent in [top, *top.parents][:4] if (parent / _TABLE).is_file()][:1]


def _check_root(root: Path, models: list[Model], state: _State, base: Base | None) -> tuple[Cell, ...]:
    folders = find_folders(root)
    facts, found, files = _apply(folders, state.engine, state.shown)
    state.files += files
    gains = read_gains(folder.path for folder in folders)
    if state.options.triton is not None:
        for folder in folders:
            found += upgrade_findings(folder, state.engine, state.options.triton, gains, state.shown)
    before = None if base is None else base.locate(root)
    state.findings += _op_findings(root, state, before)
    changed = facts
    if before is not None:
        pairs = _pair_folders(root, folders, before)
        if state.options.only_new:
            found = _without_old(found, pairs, state)
        for old, new in pairs:
            found += compare_folders(new, old, facts, state.engine, state.shown, state.options.triton)
        changed = [fact for fact in facts if _differs(fact.entry.path, root, before)]
    state.findings += found
    if state.options.targets:
        state.findings += target_findings(changed, state.compiled, state.shown)
    return _coverage(root, facts, gains, models, state, before)


def _op_findings(root: Path, state: _State, before: Path | None) -> list[Finding]:
    """What is wrong with files of ops that no engine looks up; those without rules are only counted."""
    found, files, others = _apply_to_ops(root, state.shown)
    state.files += files
    state.others += others
    if before is None or not state.options.only_new:
        return found
    old, _, _ = _apply_to_ops(before, lambda path: state.shown(root / path.relative_to(before)))
    known = {(item.rule, item.file, item.message) for item in old}
    return [item for item in found if (item.rule, item.file, item.message) not in known]


def _apply_to_ops(root: Path, shown: Callable[[Path], str]) -> tuple[list[Finding], int, Counter[str]]:
    """(findings, how many files, how many of each op without rules)."""
    facts, found, others = [], [], Counter[str]()
    for op, entry in op_files(root):
        if op not in OPS:
            others[op] += 1
            continue
        fact, more = check_op(OPS[op], entry, shown(entry.path))
        facts.append(fact)
        found += more
    return [*found, *provenance_findings(facts)], len(facts), others


def _apply(
    folders: Iterable[ConfigFolder], engine: EngineLookup, shown: Callable[[Path], str]
) -> tuple[list[FileFacts], list[Finding], int]:
    """The rules that need nothing but the folders: (facts, findings, how many files)."""
    facts: list[FileFacts] = []
    found: list[Finding] = []
    for entry in (entry for folder in folders for entry in entries(folder)):
        if entry.kind == "bad-directory":
            found.append(directory_finding(entry, shown(entry.path)))
            continue
        fact, more = check_file(entry, shown(entry.path), engine)
        facts.append(fact)
        found += more
    found += pair_findings(facts, engine)
    found += duplicate_findings(facts)
    found += provenance_findings(facts)
    return facts, found, len(facts)


def _without_old(found: list[Finding], pairs: list[tuple[ConfigFolder, ConfigFolder]], state: _State) -> list[Finding]:
    """The findings that the base does not have: same rule, same file (wherever its folder is now), same words."""
    places = {old.path: new.path for old, new in pairs}

    def shown(path: Path) -> str:
        folder = next(folder for folder in path.parents if folder in places)
        return state.shown(places[folder] / path.relative_to(folder))

    _, before, _ = _apply([old for old, _ in pairs], state.engine, shown)
    known = {(item.rule, item.file, item.message) for item in before}
    return [item for item in found if (item.rule, item.file, item.message) not in known]


def _differs(path: Path, root: Path, before: Path) -> bool:
    other = before / path.relative_to(root)
    return differ(other, path)


def _pair_folders(
    root: Path, folders: tuple[ConfigFolder, ...], before: Path
) -> list[tuple[ConfigFolder, ConfigFolder]]:
    """Every folder that the base has with its counterpart, which may have moved or be gone."""
    olds = find_folders(before)
    news = {folder.path.relative_to(root): folder for folder in folders}
    spare = [folder for place, folder in news.items() if place not in {old.path.relative_to(before) for old in olds}]
    pairs: list[tuple[ConfigFolder, ConfigFolder]] = []
    for old in olds:
        place = old.path.relative_to(before)
        pairs.append((old, news.get(place) or _moved_to(old, spare) or ConfigFolder(root / place, old.flat)))
    return pairs


def _moved_to(old: ConfigFolder, spare: list[ConfigFolder]) -> ConfigFolder | None:
    """The folder that holds most of an old folder's files by name, at least half of them."""
    names = {(entry.directory, entry.name) for entry in entries(old)}
    shared = [(len(names & {(entry.directory, entry.name) for entry in entries(new)}), new) for new in spare]
    count, best = max(shared, key=lambda pair: pair[0], default=(0, None))
    return best if 2 * count >= len(names) else None


def _models(state: _State, base: Base | None) -> list[Model]:
    """The layouts of all models; what is wrong with them, or differs from the base, becomes findings."""
    table = FAMILIES if base is None else _family_table(state, base)
    models, broken = read_models(list(state.options.models), state.shown)
    state.findings += broken
    if base is not None:
        state.findings += model_drift(list(state.options.models), base, table, state.shown)
    return models


def _family_table(state: _State, base: Base) -> tuple[Family, ...]:
    """The base's family table; rows that differ become findings."""
    for head in _table_file(state.options):
        before = base.locate(head)
        if before is not None and before.is_file():
            table, found = table_drift(head, before, base.label, state.shown(head))
            state.findings += found
            return table
    return FAMILIES


def _coverage(
    root: Path, facts: list[FileFacts], gains: tuple[Gain, ...], models: list[Model], state: _State, before: Path | None
) -> tuple[Cell, ...]:
    """Every combination that the options ask for, and what it lost against the base."""
    options = state.options
    if not models:
        return ()
    folder = moe_folder(root, options.engine)
    asked = options.devices or tuple(sorted({f.parsed.key.device_name for f in facts if f.parsed} - {""}))
    points = (options.tps, options.eps, options.dtypes, options.backend)
    ask = Ask(asked, options.triton or _newest(folder), options.engine, *points)
    try:
        cells = cover(folder, models, ask, gains)
        if before is not None:
            old = cover(moe_folder(before, options.engine), models, ask, gains)
            state.findings += compare_cells(cells, old, state.shown(folder))
    except UsageError as error:
        shown = state.shown(Path(error.file)) if error.file else state.shown(folder)
        state.findings.append(finding("bad-value", shown, error.line or 1, error.message, fix=error.fix))
        return ()
    return cells


def _newest(folder: Path) -> str:
    versions = [version for item in folder.iterdir() if (version := parse_directory(item.name)) is not None]
    return str(max(versions)) if versions else "0.0.0"


def _cell_json(cell: Cell) -> dict[str, Any]:
    row = asdict(cell)
    row.pop("key")
    return {**row, "key": cell.key.words, "result": cell.worst}
