"""The `orchestrator` command line: the stages, wired together. Light: no command's module loads what only it needs."""

from __future__ import annotations

import importlib

import typer

__all__ = ["COMMANDS", "app"]

COMMANDS = (
    "run",
    "plan",
    "status",
    "cancel",
    "check",
    "explain",
    "dispatch",
    "compare",
    "gate",
    "report",
    "browse",
    "history",
    "journal",
    "schema",
    "doctor",
    "prune",
)
"""The sub-commands in the order of a run; each is a module of orchestrator.commands."""

app = typer.Typer(
    name="orchestrator",
    help="Tune MoE and FP8 kernels, measure what the tuning is worth in serving, and gate merges on it.",
    epilog="Example: orchestrator run matrix.yaml",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _name in COMMANDS:
    importlib.import_module(f"orchestrator.commands.{_name}").register(app)
