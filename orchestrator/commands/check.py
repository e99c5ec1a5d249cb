"""`orchestrator check`: config and dispatch regressions, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.commands._output import Github
from orchestrator.commands._words import PATH, ensure_companions, given, to_write

if TYPE_CHECKING:
    from moegate.records.findings import CheckResult
    from orchestrator.check.run import Options

__all__ = ["register"]

Files = Annotated[
    list[Path] | None, typer.Argument(metavar="[FILE]...", help="Changed files, as pre-commit passes them.")
]
Configs = Annotated[
    list[Path] | None,
    typer.Option(**PATH, metavar="DIR", help="Config folders or repositories; default: what we ship."),
]
Models = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH", help="Models to cover: config.json, its folder, or several.", callback=given),
]
Devices = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="With --models: devices to cover; default: those with a file.", callback=given),
]
Dtypes = Annotated[
    list[str] | None,
    typer.Option(
        help="With --models: dtypes to cover (bfloat16, float32, fp8_w8a8); default: each model's own.",
        callback=given,
    ),
]
Backend = Annotated[str, typer.Option(help="With --models: the MoE backend that will be asked for.", callback=given)]
Base = Annotated[
    str | None,
    typer.Option(metavar="DIR|git:REF", help="Compare with a directory or a git revision.", callback=given),
]
Triton = Annotated[str | None, typer.Option(metavar="X.Y.Z", help="Simulate this Triton: which keys stop being exact.")]
Targets = Annotated[
    str | None,
    typer.Option(metavar="ARCH,...", help="Compile every config for its device (needs triton).", callback=given),
]
Source = Annotated[
    Path | None,
    typer.Option(**PATH, metavar="TREE", help="An engine's source: are its dispatch requests shadowed?"),
]
Sarif = Annotated[Path | None, typer.Option(**PATH, metavar="FILE", help="Write findings as SARIF.", callback=to_write)]
Out = Annotated[
    Path | None,
    typer.Option(**PATH, metavar="FILE", help="Write a Measurement (for a check cell).", callback=to_write),
]

_EXAMPLE = """\b
Examples:
  orchestrator check
  orchestrator check --configs kernels/configs --base git:origin/main --sarif check.sarif
  orchestrator check --configs python/sglang --engine sglang --triton 3.9.0
  orchestrator check --models examples/models/deepseek-ocr-2 --devices NVIDIA_H200 --tp 1,2
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("check", epilog=_EXAMPLE)(check)


def check(
    context: typer.Context,
    files: Files = None,
    configs: Configs = None,
    engine: Annotated[str, typer.Option(help="Whose lookup rules apply: moegate, sglang or vllm.")] = "moegate",
    models: Models = None,
    devices: Devices = None,
    tp: Annotated[str, typer.Option(help="With --models: tensor-parallel sizes to cover, such as 1,2,4.")] = "1",
    ep: Annotated[str, typer.Option(help="With --models: expert-parallel sizes to cover.")] = "1",
    dtype: Dtypes = None,
    backend: Backend = "auto",
    base: Base = None,
    only_new: Annotated[
        bool, typer.Option("--only-new", help="With --base: leave out what the base has already.")
    ] = False,
    triton: Triton = None,
    targets: Targets = None,
    source: Source = None,
    sarif: Sarif = None,
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    github: Github = False,
    limit: Annotated[int, typer.Option(min=0, help="Findings shown per rule; 0 shows all.")] = 0,
) -> None:
    """Check config files, model configs and dispatch; exit 1 on any error."""
    from orchestrator.check.run import Options, run_check

    ensure_companions(context, _COMPANIONS)
    changed, more_models, more_devices = _sort_out(files or [], bool(models), bool(devices))
    options = Options(
        configs=tuple(configs or ()),
        engine=engine,  # type: ignore[arg-type]
        models=(*(Path(text) for text in _listed(models)), *more_models),
        devices=(*_listed(devices), *more_devices),
        tps=_sizes(tp, "--tp"),
        eps=_sizes(ep, "--ep"),
        dtypes=tuple(_listed(dtype)) or (None,),
        backend=backend,
        base=base,
        triton=triton,
        targets=tuple(_listed(None if targets is None else [targets])),
        source=source,
        only_new=only_new,
    )
    options = _for_files(options, changed)
    _ensure_checked(options.configs, changed, "" if configs is None else f" in {', '.join(map(str, configs))}")
    result = _only(run_check(options), changed)
    _write(result, sarif, out)
    _print(result, as_json=as_json, github=github, limit=limit)
    raise typer.Exit(1 if result.failed else 0)


_COMPANIONS = {
    "devices": "models",
    "tp": "models",
    "ep": "models",
    "dtype": "models",
    "backend": "models",
    "only_new": "base",
}
"""Options that count with another one alone."""


def _sort_out(words: list[Path], models: bool, devices: bool) -> tuple[list[Path], list[Path], list[str]]:
    """Arguments without an option: changed files; after `--models` and `--devices` further ones of those.

    Raises:
        UsageError: a word that is none of them.
    """
    from moegate.configs import parse_name
    from moegate.devices import is_reported
    from moegate.errors import UsageError
    from moegate.paths import is_file, is_folder

    files: list[Path] = []
    more_models: list[Path] = []
    more_devices: list[str] = []
    for word in words:
        if models and (is_folder(word) or (is_file(word) and parse_name(word.name) is None)):
            more_models.append(word)
        elif is_file(word):
            files.append(word)
        elif devices and is_reported(str(word)):
            more_devices.append(str(word))
        else:
            raise UsageError("is no file", file=word, fix="name changed config files, or use --configs for a folder")
    return files, more_models, more_devices


def _for_files(options: Options, files: list[Path]) -> Options:
    """Check the folders that hold the given files, where no folder was named."""
    from dataclasses import replace

    if not files or options.configs:
        return options
    folders = {path.parent.parent if path.parent.name.startswith("triton") else path.parent for path in files}
    return replace(options, configs=tuple(sorted(folders)))


def _ensure_checked(roots: tuple[Path, ...], files: list[Path], inside: str) -> None:
    """Refuse a file that no rule looks at: `no finding` would be said of others. A sidecar counts as its config file.

    Args:
        roots: what is checked. files: what was named. inside: where config files have to lie, in words.

    Raises:
        UsageError: naming the file.
    """
    from moegate.errors import UsageError
    from moegate.records.provenance import config_name
    from orchestrator.check.trees import files_below

    known = {found.resolve() for root in roots for found in files_below(root)} if files else set()
    for path in files:
        if path.with_name(config_name(path.name)).resolve() not in known:
            raise UsageError(
                f"is no tuned config{inside}: the check does not look at it",
                file=path,
                fix=f"name files E=..,N=..,device_name=...json{inside}; a model's config goes after --models",
            )


def _only(result: CheckResult, files: list[Path]) -> CheckResult:
    """What concerns the given files, the other projection of each and the sidecars; everything where none is given."""
    from dataclasses import replace

    from moegate.records.provenance import config_name, sidecar_name

    if not files:
        return result
    configs: set[Path] = set()
    for path in files:
        stem = config_name(path.name).removesuffix(".json").removesuffix("_down")
        configs |= {(path.parent / f"{stem}{end}.json").resolve() for end in ("", "_down")}
    wanted = configs | {path.with_name(sidecar_name(path.name)) for path in configs}
    wanted |= {path.resolve() for path in files}
    found = tuple(f for f in result.findings if Path(f.file).resolve() in wanted)
    return replace(result, findings=found, files=sum(path.is_file() for path in configs))


def _write(result: CheckResult, sarif: Path | None, out: Path | None) -> None:
    if sarif is not None:
        from moegate.paths import write_atomic
        from reports.sarif import from_findings

        write_atomic(sarif, from_findings(result.findings, result.rules, base=Path.cwd()))
    if out is not None:
        from moegate.records import write
        from orchestrator.check.output import as_measurement

        write(out, as_measurement(result))


def _print(result: CheckResult, *, as_json: bool, github: bool, limit: int) -> None:
    import os
    import sys

    from orchestrator.check import output
    from orchestrator.commands._output import annotate, emit_json

    if as_json:
        emit_json(output.as_json(result))
    else:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        sys.stdout.write(output.as_text(result, colour=colour, limit=limit))
    if github:
        from reports.summary import annotate_findings

        annotate(annotate_findings(result.findings))


def _listed(values: list[str] | None) -> list[str]:
    return [part.strip() for value in values or [] for part in value.split(",") if part.strip()]


def _sizes(text: str, option: str) -> tuple[int, ...]:
    from moegate.canonical import whole
    from moegate.errors import UsageError

    sizes = [whole(part.strip(), 1, 4096) for part in text.split(",")]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        raise UsageError(f"is {text!r:.60}", field=option, fix="positive integers, such as 1,2,4")
    return tuple(dict.fromkeys(known))
