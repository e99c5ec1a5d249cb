"""Model configs: what they say, and whether they or the family table say it differently than the base."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

from moegate import canonical
from moegate.errors import UsageError
from moegate.families import FAMILIES, Family, Layout, config_file, load_layout
from moegate.families.source import families_in
from moegate.records.findings import Finding
from orchestrator.check.base import Base
from orchestrator.check.coverage import Model
from orchestrator.check.rules import finding

# What a config's name or a recorded routing depends on.
WATCHED = (
    "experts",
    "topk",
    "intermediate",
    "hidden",
    "layers",
    "dense_layers",
    "shared_experts",
    "fused_shared",
    "quant",
)


def read_models(paths: list[Path], shown: Callable[[Path], str]) -> tuple[list[Model], list[Finding]]:
    """Layouts of all models, and a finding for each config that has none."""
    models: list[Model] = []
    found: list[Finding] = []
    for path in paths:
        file = config_file(path)
        try:
            models.append(Model(shown(file), load_layout(file)))
        except UsageError as error:
            field = f"{error.field}: " if error.field else ""
            found.append(
                finding("bad-model-config", shown(file), error.line or 1, f"{field}{error.message}", fix=error.fix)
            )
    return models, found


def model_drift(
    paths: list[Path], base: Base, table: tuple[Family, ...], shown: Callable[[Path], str]
) -> Iterator[Finding]:
    """Models whose layout differs from the base's.

    Args:
        paths: the head's models. base: where their counterparts are. table: the base's family table.
    """
    for path in paths:
        file = config_file(path)
        before_file = base.locate(file)
        if before_file is None or not before_file.is_file():
            continue
        try:
            before, after = load_layout(before_file, families=table), load_layout(file)
        except UsageError:
            continue
        if words := _difference(before, after):
            yield finding("family-drift", shown(file), 1, f"{after.architecture}: {words} (against {base.label})")


def _difference(before: Layout, after: Layout) -> str:
    changed = [name for name in WATCHED if getattr(before, name) != getattr(after, name)]
    return ", ".join(f"{name} {getattr(before, name)} -> {getattr(after, name)}" for name in changed)


def table_drift(head: Path, base_file: Path, label: str, shown: str) -> tuple[tuple[Family, ...], list[Finding]]:
    """The base's family table, and a finding for every row that reads a model differently now.

    Args:
        head: the head's table.py. base_file: the base's. label: names the base. shown: the head's path as printed.
    """
    before = families_in(canonical.read_text(base_file), str(base_file))
    text = canonical.read_text(head)
    now = {family.architecture: family for family in families_in(text, str(head))}
    found: list[Finding] = []
    for family in before:
        other = now.get(family.architecture)
        line = _line_of(text, family.architecture)
        if other is None:
            found.append(
                finding("family-drift", shown, 1, f"{family.architecture} is gone from the table (in {label})")
            )
        elif words := _row_difference(family, other):
            found.append(finding("family-drift", shown, line, f"{family.architecture}: {words} (against {label})"))
    return before, found


def _row_difference(before: Family, after: Family) -> str:
    names = [f.name for f in fields(Family) if getattr(before, f.name) != getattr(after, f.name)]
    return ", ".join(f"{name} {getattr(before, name)} -> {getattr(after, name)}" for name in names)


def _line_of(text: str, architecture: str) -> int:
    at = text.find(f'"{architecture}"')
    return 1 if at < 0 else text.count("\n", 0, at) + 1


__all__ = ["FAMILIES", "model_drift", "read_models", "table_drift"]
