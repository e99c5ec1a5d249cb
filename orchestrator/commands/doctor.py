"""`orchestrator doctor`: what this machine offers, and what each missing piece costs."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor", epilog="Example: orchestrator doctor --json")(doctor)


def doctor(
    release: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="First put a withdrawn device back into use.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say what this machine offers, and what each missing piece costs. Exits 0 whatever is missing."""
    from dataclasses import asdict

    from orchestrator.commands._output import emit_json, table
    from orchestrator.doctor import examine

    for identity in release or ():
        _release(identity)
    findings = examine()
    if as_json:
        emit_json({"findings": [asdict(finding) for finding in findings]})
        return
    print(table([("ok" if f.present else "-", f.name, f.detail) for f in findings]))
    for finding in findings:
        if not finding.present:
            print(f"\n{finding.name}: without it {finding.cost}\n  fix: {finding.fix}")


def _release(identity: str) -> None:
    from moegate.errors import UsageError
    from orchestrator.commands._output import say
    from orchestrator.pools import withdrawn

    if not withdrawn.release(identity):
        known = ", ".join(mark.identity for mark in withdrawn.marks().values()) or "none is"
        raise UsageError(f"{identity} is not withdrawn", field="--release", fix=f"withdrawn: {known}")
    say(f"released {identity}")
