"""What `orchestrator check` found: one record for text, JSON, SARIF, annotations and the gate."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["CheckResult", "Finding", "RuleText", "Severity"]

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class RuleText:
    """A rule as reports show it: what it means, how to fix it, where it comes from."""

    id: str
    severity: Severity
    explanation: str
    fix: str
    reference: str


@dataclass(frozen=True)
class Finding:
    """One thing found in one place. `line` counts from 1; `fix` says what would be right."""

    rule: str
    severity: Severity
    file: str
    line: int
    message: str
    fix: str


@dataclass(frozen=True)
class CheckResult:
    """Everything one run of the check found.

    `files` counts config files read; `rules` are the texts of the rules that found something; `coverage` and
    `accepted` (dispatch changes that the lock file accepts) are tables for reports.
    """

    findings: tuple[Finding, ...]
    files: int
    rules: tuple[RuleText, ...] = ()
    coverage: tuple[dict[str, Any], ...] = ()
    accepted: tuple[dict[str, Any], ...] = ()
    detail: dict[str, Any] = field(default_factory=dict)
    schema: int = 1

    @property
    def counts(self) -> dict[str, int]:
        """Findings per rule, by name."""
        return dict(sorted(Counter(finding.rule for finding in self.findings).items()))

    @property
    def failed(self) -> bool:
        """Whether any finding is an error."""
        return any(finding.severity == "error" for finding in self.findings)
