"""`orchestrator schema`: the JSON Schema of matrix.yaml, for editors."""

from __future__ import annotations

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("schema", epilog="Example: orchestrator schema > matrix.schema.json")(schema)


def schema() -> None:
    """Print the JSON Schema of matrix.yaml."""
    from orchestrator.commands._output import emit_json
    from orchestrator.matrix.schema import json_schema

    emit_json(json_schema())
