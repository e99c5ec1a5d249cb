"""One run of the check: options in, findings and tables out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moegate.configs import parse_directory, parse_version
from moegate.configs.engines import EngineLookup, engine_of
from moegate.configs.values import Engine
from moegate.errors import UsageError
from moegate.families import FAMILIES
from moegate.paths import config_root
from moegate.records.findings import CheckResult, Finding
from orchestrator.check.base import Base, open_base
from orchestrator.check.compare import compare_folders
from orchestrator.check.coverage import Ask, Cell, compare_cells, cover
from orchestrator.check.dispatching import accepted_changes, lock_findings, source_findings
from orchestrator.check.files import FileFacts, check_file, shown_path
from orchestrator.check.gains import Gain, read_gains
from orchestrator.check.kernel import kernel_hash
from orchestrator.check.models import model_drift, read_models, table_drift
from orchestrator.check.rules import RULES, finding, texts
from orchestrator.check.targets import target_findings
from orchestrator.check.trees import ConfigFolder, entries, find_folders
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
    files: int = 0

    def shown(self, path: Path) -> str:
        """`path` as findings print it."""
        return shown_path(path, self.start)


def run_check(options: Options) -> CheckResult:
    """Apply every rule that the options ask for.

    Raises:
        UsageError: an option, not a checked file, is wrong (exit 2).
    """
    state = _State(options, engine_of(options.engine), options.start.resolve(), [])
    if options.triton is not None:
        parse_version(options.triton)
    roots = options.configs or (config_root(),)
    lock = _lock_file(options)
    with ExitStack() as stack:
        base = None
        if options.base is not None:
            wanted = [*roots, *options.models, *([lock] if lock else []), *_table_file(options)]
            base = stack.enter_context(open_base(options.base, wanted, state.start))
        cells: tuple[Cell, ...] = ()
        for root in roots:
            cells += _check_root(root, state, base)
        accepted: tuple[dict[str, Any], ...] = ()
        if lock is not None:
            state.findings += lock_findings(lock, state.shown)
            accepted = accepted_changes(lock, base) if base is not None else ()
    if options.source is not None:
        _, found = source_findings(options.source, None, options.base, state.shown)
        state.findings += found
    findings = tuple(sorted(state.findings, key=_order))
    return CheckResult(
        findings, state.files, texts(findings), tuple(_cell_json(cell) for cell in cells), accepted, _detail(options)
    )


def _order(item: Finding) -> tuple[int, int, str, int]:
    rules = [rule.id for rule in RULES]
    return _SEVERITY.index(item.severity), rules.index(item.rule), item.file, item.line


def _detail(options: Options) -> dict[str, Any]:
    return {"engine": options.engine, "triton": options.triton, "base": options.base}


def _lock_file(options: Options) -> Path | None:
    """The lock beside the configs that are checked: `kernels/dispatch.lock.json` of a checkout."""
    roots = options.configs or (config_root(),)
    candidates = [folder / LOCK for root in roots for folder in (root, root.parent)]
    return next((path for path in candidates if path.is_file()), None)


def _table_file(options: Options) -> list[Path]:
    """The family table of the checkout that is checked, if it is one of ours."""
    top = (options.configs[0] if options.configs else config_root()).resolve()
    return [parent / _TABLE for parent in [top, *top.parents][:4] if (parent / _TABLE).is_file()][:1]


def _check_root(root: Path, state: _State, base: Base | None) -> tuple[Cell, ...]:
    folders = find_folders(root)
    facts, found, files = _apply(folders, state.engine, state.shown)
    state.files += files
    gains = read_gains(folder.path for folder in folders)
    if state.options.triton is not None:
        for folder in folders:
            found += upgrade_findings(folder, state.engine, state.options.triton, gains, state.shown)
    before = None if base is None else base.locate(root)
    changed = facts
    if before is not None:
        if state.options.only_new:
            found = _without_old(found, root, before, state)
        found += _compare_root(root, folders, before, facts, state)
        changed = [fact for fact in facts if _differs(fact.entry.path, root, before)]
    state.findings += found
    if state.options.targets:
        state.findings += target_findings(changed, state.options.targets, state.shown)
    return _coverage(folders, facts, gains, state, base)


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
    found += provenance_findings(facts, kernel_hash())
    return facts, found, len(facts)


def _without_old(found: list[Finding], root: Path, before: Path, state: _State) -> list[Finding]:
    """The findings that the base does not have: same rule, same file, same words."""
    _, old, _ = _apply(find_folders(before), state.engine, lambda path: state.shown(root / path.relative_to(before)))
    known = {(item.rule, item.file, item.message) for item in old}
    return [item for item in found if (item.rule, item.file, item.message) not in known]


def _differs(path: Path, root: Path, before: Path) -> bool:
    other = before / path.relative_to(root)
    return not other.is_file() or other.read_bytes() != path.read_bytes()


def _compare_root(
    root: Path, folders: tuple[ConfigFolder, ...], before: Path, facts: list[FileFacts], state: _State
) -> Iterator[Finding]:
    """Every folder that the base has against its counterpart, which may be gone."""
    olds = find_folders(before)
    news = {folder.path.relative_to(root): folder for folder in folders}
    for old in olds:
        place = old.path.relative_to(before)
        new = news.get(place, ConfigFolder(root / place, old.flat))
        if len(olds) == len(folders) == 1:
            new = folders[0]
        yield from compare_folders(new, old, facts, state.engine, state.shown, state.options.triton)


def _coverage(
    folders: tuple[ConfigFolder, ...], facts: list[FileFacts], gains: tuple[Gain, ...], state: _State, base: Base | None
) -> tuple[Cell, ...]:
    options = state.options
    table = FAMILIES
    if base is not None:
        table = _family_table(state, base)
    if not options.models:
        return ()
    models, broken = read_models(list(options.models), state.shown)
    state.findings += broken
    if base is not None:
        state.findings += model_drift(list(options.models), base, table, state.shown)
    folder = folders[0]
    devices = options.devices or tuple(sorted({f.parsed.key.device_name for f in facts if f.parsed} - {""}))
    ask = Ask(devices, options.triton or _newest(folder), options.engine, options.tps, options.eps, options.dtypes,
              options.backend)  # fmt: skip
    try:
        cells = cover(folder.path, models, ask, gains)
    except UsageError as error:
        state.findings.append(_damaged(error, state.shown(folder.path)))
        return ()
    before = None if base is None else base.locate(folder.path)
    if before is not None:
        old_folder = find_folders(before)[0]
        try:
            state.findings += compare_cells(cells, cover(old_folder.path, models, ask, gains), state.shown(folder.path))
        except UsageError:
            return cells
    return cells


def _damaged(error: UsageError, shown: str) -> Finding:
    return finding("bad-value", error.file or shown, error.line or 1, error.message, fix=error.fix)


def _family_table(state: _State, base: Base) -> Any:
    for head in _table_file(state.options):
        before = base.locate(head)
        if before is not None and before.is_file():
            table, found = table_drift(head, before, base.label, state.shown(head))
            state.findings += found
            return table
    return FAMILIES


def _newest(folder: ConfigFolder) -> str:
    names: Iterable[str] = (entry.directory for entry in entries(folder))
    versions = [version for name in names if (version := parse_directory(name)) is not None]
    return str(max(versions)) if versions else "0.0.0"


def _cell_json(cell: Cell) -> dict[str, Any]:
    row = asdict(cell)
    row.pop("key")
    return {**row, "key": cell.key.words, "result": cell.worst}
