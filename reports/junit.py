"""`junit.xml`: one test case per cell, for whatever reads JUnit."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from moegate.records import RunBundle, ShellLine
from reports.text import clip, one_line, tail
from reports.view.joined import Joined, join

__all__ = ["render"]

_LOG_CHARACTERS = 4000
# Which element an outcome becomes; the others pass. Inconclusive cells fail only where the gate says so.
_ELEMENTS = {"regressed": "failure", "failed": "failure", "missing": "error", "quarantined": "skipped"}


def render(bundle: RunBundle) -> str:
    """Return a run as JUnit XML: classname is pool and kind, the type of a failure is its verdict or state."""
    cells = join(bundle)
    suite = ET.Element("testsuite", name=one_line(bundle.plan.name), timestamp=one_line(bundle.started, 40))
    counts = {"failure": 0, "error": 0, "skipped": 0}
    total = 0.0
    for joined in cells:
        seconds = _seconds(joined)
        total += seconds
        element = _testcase(suite, joined, bundle.commands.get(joined.cell.id, ()), seconds)
        if element is not None:
            counts[element] += 1
    numbers = {"tests": len(cells), "failures": counts["failure"], "errors": counts["error"]}
    for name, number in {**numbers, "skipped": counts["skipped"], "time": f"{total:.3f}"}.items():
        suite.set(name, str(number))
    root = ET.Element("testsuites", {key: suite.attrib[key] for key in ("tests", "failures", "errors", "time")})
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def element_for(joined: Joined) -> tuple[str, str] | None:
    """Return (element, type) of a cell that did not simply pass, or None; the gate's own reasons decide ties."""
    element = _ELEMENTS.get(joined.word)
    if element is None and joined.blame in (1, 4):
        element = "failure"
    elif element is None and joined.blame:
        element = "error"
    if element is None:
        return None
    kind = joined.state if joined.word in ("failed", "missing") and joined.state != "PASSED" else joined.word
    return element, kind


def _testcase(suite: ET.Element, joined: Joined, commands: Sequence[ShellLine], seconds: float) -> str | None:
    cell = joined.cell
    case = ET.SubElement(
        suite,
        "testcase",
        classname=f"{one_line(cell.pool or 'host', 80)}.{cell.kind}",
        name=one_line(cell.label, 300),
        time=f"{seconds:.3f}",
    )
    properties = ET.SubElement(case, "properties")
    for name, shown in _properties(joined):
        ET.SubElement(properties, "property", name=name, value=one_line(shown, 400))
    found = element_for(joined)
    if found is None:
        return None
    element, kind = found
    message = joined.decided or joined.reason
    if element == "skipped":
        ET.SubElement(case, "skipped", message=one_line(message, 400))
        return element
    typed = (f"reproduce{f' {one_line(x.arm, 60)}' if x.arm else ''}: {one_line(x.line, 4000)}" for x in commands)
    body = "\n".join(filter(None, (one_line(message, 800), *typed)))
    ET.SubElement(case, element, message=one_line(message, 400), type=one_line(kind, 60)).text = body
    log = tail(joined.outcome.log_tail, _LOG_CHARACTERS) if joined.outcome else ""
    if log:
        ET.SubElement(case, "system-err").text = clip(log, 2 * _LOG_CHARACTERS)
    return element


def _properties(joined: Joined) -> list[tuple[str, str]]:
    verdict = joined.verdict
    rows = [("id", joined.cell.id), ("state", joined.state), ("outcome", joined.word)]
    if verdict is None:
        return rows
    rows.append(("verdict", verdict.verdict or "none"))
    effect = verdict.effect
    if effect is not None:
        rows += [
            ("metric", effect.metric),
            ("unit", effect.unit),
            ("better", effect.better),
            ("baseline", f"{effect.baseline_median:.6g}"),
            ("candidate", f"{effect.candidate_median:.6g}"),
            ("ratio", f"{effect.ratio:.6g}"),
            ("ratio_low", f"{effect.low:.6g}"),
            ("ratio_high", f"{effect.high:.6g}"),
            ("gain", f"{effect.gain:.6g}"),
            ("level", f"{effect.level:.4g}"),
            ("pairs", str(effect.pairs)),
        ]
    numbers = {"p": verdict.p, "threshold": verdict.threshold, "detectable": verdict.detectable}
    rows += [(name, f"{number:.6g}") for name, number in numbers.items() if number is not None]
    rows += [("device", verdict.device)] if verdict.device else []
    return rows


def _seconds(joined: Joined) -> float:
    return sum(attempt.wall_s for attempt in joined.outcome.attempts) if joined.outcome else 0.0
