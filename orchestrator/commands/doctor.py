"""`orchestrator doctor`: what this machine offers, and what each missing piece costs."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor", epilog="Example: orchestrator doctor --json")(doctor)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Say what this machine offers, and what each missing piece costs. Always exits 0."""
    from dataclasses import asdict

    from orchestrator.commands._output import emit_json, table
    from orchestrator.doctor import examine

    findings = examine()
    if as_json:
        emit_json({"findings": [asdict(finding) for finding in findings]})
        return
    print(table([("ok" if f.present else "-", f.name, f.detail) for f in findings]))
    for finding in findings:
        if not finding.present:
            print(f"\n{finding.name}: without it {finding.cost}\n  fix: {finding.fix}")
