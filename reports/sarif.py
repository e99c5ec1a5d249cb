"""`results.sarif` (SARIF 2.1.0): regressions on the config line that caused them, and what the check found.

GitHub shows each result on its line in the pull request; more than 5,000 results of a run are not read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from moegate.paths import is_file
from moegate.records import ConfigUse, RunBundle
from moegate.records.findings import Finding, RuleText
from reports.text import clip, one_line
from reports.view.joined import Joined, gain_of, join, side_of, span_of

__all__ = ["SCHEMA", "from_findings", "render"]

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
MAX_RESULTS = 5000
MAX_PLACES = 64  # config entries of a cell that are looked up; the first few are told
_LEVELS = {"error": "error", "warning": "warning", "note": "note"}
# What the gate reports about cells: rule id -> (short text, what to do).
_RULES = {
    "regressed": (
        "A cell regressed",
        "Compare the configuration of the two arms; the commands in the cell's part of report.html reproduce it.",
    ),
    "failed": (
        "A cell did not finish its work",
        "Read the end of the cell's log; the command in the cell's part of report.html reproduces it.",
    ),
    "missing": ("A planned cell has no answer", "Run the same matrix again with --resume."),
}


def render(bundle: RunBundle, *, root: Path | None = None) -> str:
    """Return the cells that went wrong as SARIF.

    A regression stands on the line of the batch size in the config file that the candidate ran with; other cells stand
    on the matrix. `root` is the checkout in which config files are looked up for their lines; without it the lines are
    those of the file as the tuner writes it.
    """
    results: list[dict[str, Any]] = []
    for joined in join(bundle):
        if joined.word in _RULES:
            results += _cell_results(bundle, joined, root)
    rules = [_rule(name, words, fix) for name, (words, fix) in _RULES.items()]
    return _document(rules, results, bundle.plan.version)


def from_findings(
    findings: Iterable[Finding], rules: Sequence[RuleText] = (), *, version: str = "", base: Path | None = None
) -> str:
    """Return findings of `orchestrator check` as SARIF; file names are made relative to `base` where they lie in it."""
    rows = list(findings)
    known = {rule.id: rule for rule in rules}
    made = []
    for name in sorted({finding.rule for finding in rows} | set(known)):
        text = known.get(name)
        made.append(
            _rule(name, text.explanation if text else name, text.fix if text else "", text.reference if text else "")
        )
    results = [
        _result(
            finding.rule,
            _LEVELS[finding.severity],
            f"{finding.message} (fix: {finding.fix})" if finding.fix else finding.message,
            _relative(finding.file, base),
            finding.line,
            finding.message,
        )
        for finding in rows
    ]
    return _document(made, results, version)


def _cell_results(bundle: RunBundle, joined: Joined, root: Path | None) -> list[dict[str, Any]]:
    effect = joined.verdict.effect if joined.verdict else None
    label = one_line(joined.cell.label, 200)
    if joined.word != "regressed" or effect is None:
        message = f"{label}: {joined.state}: {one_line(joined.reason, 400)}"
        return [_result(joined.word, "error", message, _relative(bundle.plan.matrix, root), 1, joined.cell.id)]
    arms = f"{joined.cell.arms[-1]} against {joined.cell.arms[0]}" if joined.cell.arms else "candidate against baseline"
    gain = (
        f"gain {gain_of(joined, effect)} ({span_of(joined, effect)}, {effect.pairs} pairs; {effect.better} is better)"
    )
    message = f"{label}: {effect.metric} of {arms}: {gain}"
    places = _places(bundle, joined, root) or [(_relative(bundle.plan.matrix, root), 1)]
    return [_result("regressed", "error", message, file, line, joined.cell.id) for file, line in places[:8]]


def _places(bundle: RunBundle, joined: Joined, root: Path | None) -> list[tuple[str, int]]:
    """Return (file, line) of every config entry that the candidate ran with and the baseline did not."""
    arms: tuple[dict[Any, ConfigUse], dict[Any, ConfigUse]] = ({}, {})
    trees = _trees(bundle, joined)
    for launch in joined.launches:
        if launch.proof is not None:
            if launch.proof.configs_root and side_of(joined, launch):
                trees[launch.proof.configs_root] = None
            for use in launch.proof.configs:
                arms[side_of(joined, launch)][use.op, use.projection, use.batch_size] = use
    places: dict[tuple[str, int], None] = {}
    files: dict[str, dict[int, int]] = {}
    for key, use in arms[1].items():
        before = arms[0].get(key)
        if len(places) >= MAX_PLACES:
            break
        if use.file and (before is None or before.config != use.config):
            path = _inside(root, trees, use.file)
            if use.file not in files:
                files[use.file] = _entries(_text(bundle, root, path, use.file))
            places[path or use.file, _line(files[use.file], use.batch_size)] = None
    return sorted(places)


def _trees(bundle: RunBundle, joined: Joined) -> dict[str, None]:
    """Return the folders in which the candidate's config files may lie, as the plan names them."""
    name = joined.cell.arms[-1] if joined.cell.arms else ""
    found = [arm.configs for arm in bundle.plan.arms if arm.name == name and arm.configs.startswith("/")]
    return {tree + end: None for tree in (*found, "kernels") for end in ("", "/configs")}


def _inside(root: Path | None, trees: Iterable[str], file: str) -> str | None:
    """Return where a config file lies below `root`, relative to it, or None."""
    if root is None:
        return None
    base = root.resolve()
    for path in (base / file, *(base / tree / file for tree in trees)):
        if is_file(path) and path.resolve().is_relative_to(base):
            return str(path.resolve().relative_to(base))
    return None


def _text(bundle: RunBundle, root: Path | None, path: str | None, file: str) -> str:
    """Return a config file's text: from the checkout, else as the tuner writes it, else nothing."""
    if root is not None and path is not None:
        try:
            with (root / path).open(encoding="utf-8", errors="replace") as stream:
                return stream.read(4 << 20)
        except OSError:  # it may not be read: then as for one that is not there
            pass
    for name, content in bundle.config_files.items():
        if name == file or name.endswith("/" + file):
            return json.dumps(content, indent=4)
    return ""


def _entries(text: str) -> dict[int, int]:
    """Return the line (from 1) on which the entry of each batch size begins."""
    entries, line, at = {}, 1, 0
    for found in re.finditer(r'"(\d{1,9})"\s*:', text):
        line, at = line + text.count("\n", at, found.start()), found.start()
        entries[int(found[1])] = line
    return entries


def _line(entries: dict[int, int], batch_size: int) -> int:
    """Return the line of the nearest batch size's entry; 1 where there is none."""
    nearest = min(entries, key=lambda batch: (abs(batch - batch_size), batch), default=None)
    return 1 if nearest is None else entries[nearest]


def _relative(file: str, base: Path | None) -> str:
    path = PurePosixPath(file)
    if base is not None and path.is_absolute() and path.is_relative_to(base.resolve()):
        path = path.relative_to(base.resolve())
    return str(path)


def _rule(name: str, words: str, fix: str, reference: str = "") -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": one_line(name, 120),
        "name": "".join(part.capitalize() for part in one_line(name, 120).split("-")),
        "shortDescription": {"text": one_line(words, 400) or name},
        "fullDescription": {"text": one_line(words, 1000) or name},
    }
    if fix:
        made["help"] = {"text": one_line(fix, 1000)}
    if reference.startswith("https://"):
        made["helpUri"] = quote(reference, safe=":/?#=&%")
    return made


def _result(rule: str, level: str, message: str, file: str, line: int, identity: str) -> dict[str, Any]:
    uri = quote(one_line(file, 1000), safe="/:" if file.startswith("/") else "/")
    location = {"artifactLocation": {"uri": uri or "matrix.yaml"}, "region": {"startLine": max(line, 1)}}
    print_ = hashlib.sha256("\0".join((rule, uri, one_line(identity))).encode()).hexdigest()
    return {
        "ruleId": one_line(rule, 120),
        "level": level,
        "message": {"text": clip(one_line(message, 1000), 1000)},
        "locations": [{"physicalLocation": location}],
        "partialFingerprints": {"moegate/v1": print_[:32]},
    }


def _document(rules: list[dict[str, Any]], results: list[dict[str, Any]], version: str) -> str:
    index = {rule["id"]: number for number, rule in enumerate(rules)}
    order = {"error": 0, "warning": 1, "note": 2}
    kept = sorted(results, key=lambda result: order[result["level"]])[:MAX_RESULTS]
    for result in kept:
        result["ruleIndex"] = index[result["ruleId"]]
    driver = {"name": "moegate", "version": version or "0", "rules": rules}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": kept}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, ensure_ascii=True) + "\n"
