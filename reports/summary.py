"""What GitHub shows: `summary.md` for a job, annotations for its lines, and log text that cannot give orders.

Everything that others wrote is cleaned and turned into numeric entities where Markdown, HTML or a workflow command
could see more than text in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from moegate.exits import Exit, rank
from moegate.records import RunBundle
from moegate.records.findings import Finding
from moegate.text import MOST_ANNOTATIONS, workflow_command
from reports.text import one_line, value
from reports.view.joined import Joined, gain_of, join, noise_of, predicted_of, span_of
from reports.view.page import INTERPRETER_NOTE
from reports.view.reading import gain_line, interval_line, outcome_lines
from reports.words import LOOKS

__all__ = ["MAX_BYTES", "annotate", "annotate_findings", "render"]

MAX_BYTES = 1024 * 1024 - 4096
"""GitHub refuses a job summary over 1024 KiB; a little is left for what else the step writes."""

_SPECIAL = re.compile(r"[\\`*_{}\[\]<>()#|~@:&$!\"'=^]|www\.")
_ROOM_FOR_DETAILS = 400 * 1024
_HEADINGS = {0: "✅ passes", 1: "❌ fails", 2: "❌ an input is wrong", 3: "⛔ incomplete", 4: "❓ undecided"}


def md(text: str, limit: int = 300) -> str:
    """Return text of others on one line, inert in Markdown, HTML and workflow commands."""
    return _SPECIAL.sub(lambda found: "".join(f"&#{ord(c)};" for c in found[0]), one_line(text, limit))


def render(bundle: RunBundle) -> str:
    """Return the job summary: verdict, counts, what decided, the 2x2, the cells; within GitHub's limit."""
    cells = sorted(join(bundle), key=lambda joined: (joined.look.rank, joined.cell.label))
    parts = [_head(bundle, cells), _decided(cells, bundle), _reading(bundle, cells), _squares(bundle, cells)]
    parts.append(_table(cells))
    parts.append("Full page: `report.html` in this run's artifact; machine-readable: `junit.xml`, `results.sarif`.\n")
    text = "\n".join(part for part in parts if part)
    return text if len(text.encode()) <= MAX_BYTES else _cut(text)


def _cut(text: str) -> str:
    kept = text.encode()[: MAX_BYTES - 200].decode(errors="ignore")
    return kept[: kept.rfind("\n")] + "\n\nThe rest did not fit here: open `report.html` in this run's artifact.\n"


def _head(bundle: RunBundle, cells: Iterable[Joined]) -> str:
    word = _HEADINGS.get(bundle.gate.exit, "stopped")
    lines = [f"## moegate: {md(bundle.plan.name, 80)} {word}", "", f"**{md(bundle.gate.sentence, 600)}**", ""]
    joined = list(cells)
    counts = Counter(one.word for one in joined)
    shown = [f"{LOOKS[key].arrow} {counts[key]} {LOOKS[key].word}" for key in LOOKS if counts.get(key)]
    lines.append(" · ".join(shown))
    if any(one.interpreter for one in joined):
        lines += ["", f"> {INTERPRETER_NOTE}"]
    return "\n".join(lines) + "\n"


def _decided(cells: Iterable[Joined], bundle: RunBundle) -> str:
    failing = (reason for reason in bundle.gate.reasons if reason.exit)
    reasons = sorted(failing, key=lambda reason: rank(reason.exit))[:50]
    if not reasons:
        return ""
    labels = {joined.cell.id: joined.cell.label for joined in cells}
    lines = ["### What decided", ""]
    for reason in reasons:
        name = labels.get(reason.cell or "", "")
        lines.append(f"- {'**' + md(name, 120) + '** ' if name else ''}{md(reason.message, 400)}")
    return "\n".join(lines) + "\n"


def _reading(bundle: RunBundle, cells: list[Joined]) -> str:
    """What the gains below are, and the outcomes whose words do not say it all."""
    lines = [line for line in (gain_line(bundle), interval_line(cells)) if line] if interval_line(cells) else []
    lines += outcome_lines(cells)
    return "\n".join(f"> {md(line, 600)}  " for line in lines) + "\n" if lines else ""


def _squares(bundle: RunBundle, cells: Iterable[Joined]) -> str:
    index = {joined.cell.id: joined for joined in cells}
    lines: list[str] = []
    for one in bundle.comparison.interactions[:6]:
        rows = [(backend, index[cell]) for backend, cell in one.cells.items() if cell in index]
        lines += [
            "",
            f"### {md(one.label, 120)}",
            "",
            f"| backend | {_measured(rows)} | gain (interval) | predicted gain in time per output token | outcome |",
        ]
        lines.append("|---|--:|--:|--:|--:|---|")
        lines += [_square_row(backend, joined) for backend, joined in rows]
    return "\n".join(lines) + "\n" if lines else ""


def _measured(rows: list[tuple[str, Joined]]) -> str:
    """The headings of the two arms' columns: the arm, and what was measured of it."""
    effect = next((one.verdict.effect for _, one in rows if one.verdict and one.verdict.effect), None)
    arms = rows[0][1].cell.arms if rows and len(rows[0][1].cell.arms) > 1 else ("baseline", "candidate")
    metric = f" {md(effect.metric, 60)}" if effect is not None else ""
    return " | ".join(f"{md(arm, 60)}{metric}" for arm in arms[:2])


def _square_row(backend: str, joined: Joined) -> str:
    effect = joined.verdict.effect if joined.verdict else None
    predicted = predicted_of(joined)
    control = " (control)" if joined.cell.control else ""
    if effect is None:
        return f"| {md(backend, 40)}{control} | | | | | {joined.look.arrow} {joined.look.word} |"
    unit = md(effect.unit, 20)
    before, after = value(effect.baseline_median), value(effect.candidate_median)
    gain = f"{gain_of(joined, effect)} ({span_of(joined, effect)})"
    return (
        f"| {md(backend, 40)}{control} | {before} {unit} | {after} {unit} | {gain} | {predicted} "
        f"| {joined.look.arrow} {joined.look.word} |"
    )


def _table(cells: list[Joined]) -> str:
    lines = [
        "<details><summary>All cells</summary>",
        "",
        "| outcome | cell | gain of | gain | why |",
        "|---|---|---|--:|---|",
    ]
    room = _ROOM_FOR_DETAILS
    for index, joined in enumerate(cells):
        effect = joined.verdict.effect if joined.verdict else None
        gain = gain_of(joined, effect) if effect else ""
        metric = md(effect.metric, 60) if effect else ""
        why = md(joined.reason, 160) if joined.look.rank < 4 else noise_of(joined)
        row = f"| {joined.look.arrow} {joined.look.word} | {md(joined.cell.label, 120)} | {metric} | {gain} | {why} |"
        room -= len(row.encode()) + 1
        if room < 0:
            lines += ["", f"{len(cells) - index} more cells are in `report.html`."]
            break
        lines.append(row)
    return "\n".join([*lines, "", "</details>"]) + "\n"


def annotate(bundle: RunBundle) -> list[str]:
    """Return workflow commands for what decided the run: at most 10 errors and 10 warnings, GitHub's limit per step."""
    labels = {cell.id: cell.label for cell in bundle.plan.cells}
    failing = (Exit.REGRESSION, Exit.USAGE, Exit.INFRA)
    levels = {
        "error": [reason for reason in bundle.gate.reasons if reason.exit in failing],
        "warning": [reason for reason in bundle.gate.reasons if reason.exit not in failing],
    }
    return [
        workflow_command(level, reason.message, title=labels.get(reason.cell or "", "moegate gate"))
        for level, reasons in levels.items()
        for reason in reasons[:MOST_ANNOTATIONS]
    ]


def annotate_findings(findings: Iterable[Finding]) -> list[str]:
    """Return workflow commands for findings of the check, on their lines: at most 10 of each level."""
    levels: dict[str, list[Finding]] = {"error": [], "warning": [], "notice": []}
    for finding in findings:
        levels["notice" if finding.severity == "note" else finding.severity].append(finding)
    return [
        workflow_command(
            level,
            f"{finding.message} (fix: {finding.fix})" if finding.fix else finding.message,
            file=finding.file,
            line=str(finding.line),
            title=finding.rule,
        )
        for level, rows in levels.items()
        for finding in rows[:MOST_ANNOTATIONS]
    ]
