"""`tuner compile`: compile for hardware that is not here, and write what the compiler says as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moegate.canonical import load_json
from moegate.configs import parse_name
from moegate.errors import UsageError
from moegate.exits import Exit
from moegate.paths import write_atomic
from moegate.records.provenance import SUFFIX
from tuner.commands.common import answer_stream
from tuner.commands.options import PATH, place

__all__ = ["register", "run"]

_DEFAULT_TARGETS = "sm_90,sm_100,gfx942,gfx950"
_MOST_JOBS = 1024
_SHOWN = 10  # of what did not come out well


def register(app: typer.Typer) -> None:
    """Add the command to the tuner's command line."""

    @app.command("compile")
    def _compile(
        targets: Annotated[str, typer.Option(help="Comma-separated: sm_90, sm_100, gfx942, gfx950, bmg.")] = (
            _DEFAULT_TARGETS
        ),
        configs: Annotated[
            Path | None, typer.Option(**PATH, help="Compile the configs of a folder or file instead.")
        ] = None,
        files: Annotated[Path | None, typer.Option(**PATH, help="The same, for a JSON list of config files.")] = None,
        variants: Annotated[str, typer.Option(help="all, basic (each kernel once), or words of their names.")] = "all",
        out: Annotated[Path | None, typer.Option(**PATH, help="Where to write the JSON.", callback=place)] = None,
        jobs: Annotated[int, typer.Option(min=0, max=_MOST_JOBS, help="Compiling processes; 0: one per core.")] = 0,
        as_json: Annotated[bool, typer.Option("--json", help="Print the JSON on standard output.")] = False,
        python: Annotated[
            Path | None,
            typer.Option(**PATH, envvar="MOEGATE_COMPILE_PYTHON", help="Python of an environment whose Triton compiles "
                         "for the targets that ours cannot (bmg: triton-xpu)."),
        ] = None,
    ) -> None:  # fmt: skip
        """Compile every kernel variant, or every config of a folder, without a GPU.

        Example: tuner compile --targets sm_90,gfx942 --configs kernels/configs --out facts.json
        """
        raise typer.Exit(
            run(targets=targets, configs=configs, files=files, variants=variants, out=out, jobs=jobs, as_json=as_json,
                python=python)
        )  # fmt: skip


def run(*, targets: str = _DEFAULT_TARGETS, configs: Path | None = None, files: Path | None = None,
        variants: str = "all", out: Path | None = None, jobs: int = 0, as_json: bool = False,
        python: Path | None = None) -> int:  # fmt: skip
    """Compile and write the facts; exit code 1 where something did not compile."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise UsageError("TRITON_INTERPRET is set: interpreted kernels cannot be compiled", fix="unset it")
    from tuner.compile.foreign import Foreign
    from tuner.compile.run import compile_files, compile_variants
    from tuner.compile.targets import find

    wanted = list({found.name: found for found in map(find, filter(str.strip, targets.split(",")))}.values())
    if not wanted:
        raise UsageError("no target", field="--targets", fix=_DEFAULT_TARGETS)
    workers = jobs or os.cpu_count() or 1
    foreign = None if python is None else Foreign(python)
    begin = time.monotonic()
    if configs is not None and files is not None:
        raise UsageError("give either --configs or --files", field="--files")
    if variants != "all" and not (configs is None and files is None):
        raise UsageError("chooses among kernels, not among config files", field="--variants",
                         fix="leave it out, or --configs and --files")  # fmt: skip
    if configs is not None or files is not None:
        rows = compile_files(_paths(configs, files), wanted, workers, _progress(as_json), foreign)
    else:
        rows = compile_variants(wanted, _named(variants), workers, _progress(as_json), foreign)
    names = [t.name for t in wanted]
    document = {"schema": 1, "targets": names, "seconds": round(time.monotonic() - begin, 1),
                "counts": _counts(rows), "facts": rows}  # fmt: skip
    text = json.dumps(document, indent=1)
    if out is not None:
        write_atomic(out, text)
    if as_json:
        print(text)
    counted = _counted(rows)
    what = "kernels" if configs is None and files is None else "entries of config files"
    said = answer_stream(as_json)
    print(f"{what} for {', '.join(names)}: {counted}", file=said)
    bad = [row for row in rows if _outcome(row) not in ("ok", "skipped")]
    print("".join(f"  {_said(row)}\n" for row in bad[:_SHOWN]), end="", file=said)
    if len(bad) > _SHOWN:
        print(f"  and {len(bad) - _SHOWN} more (--out or --json has all)", file=said)
    return Exit.REGRESSION if bad else Exit.OK


def _named(words: str) -> list[str]:
    from tuner.compile.variants import VARIANTS

    if words in ("all", "basic"):
        return [v.name for v in VARIANTS if words == "all" or v.basic]
    chosen = [v.name for v in VARIANTS if words.split() and all(word in v.name for word in words.split())]
    if not chosen:
        raise UsageError(f"no variant has {words!r} in its name", field="--variants", fix="all, basic or experts")
    return chosen


def _paths(configs: Path | None, files: Path | None) -> list[Path]:
    if files is not None:
        listed = load_json(files)
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise UsageError(
                "a list of paths is needed", file=files, field="--files", fix='["E=..,N=..,device_name=...json"]'
            )
        return [_named_config(Path(item), "--files") for item in listed]
    assert configs is not None
    if not configs.exists():
        raise UsageError("does not exist", file=configs, field="--configs")
    if not configs.is_dir():
        return [_named_config(configs, "--configs")]
    named = {*configs.rglob("E=*.json"), *configs.rglob("N=*.json")}
    paths = [path for path in sorted(named) if not path.name.endswith(SUFFIX)]
    if not paths:
        raise UsageError("holds no config file of routed experts or a dense layer", file=configs, field="--configs",
                         fix="files named E=..,N=..,device_name=...json or N=..,K=..,device_name=...json")  # fmt: skip
    return paths


def _named_config(path: Path, field: str) -> Path:
    """A file that somebody named, which must be a config file by its name; a folder may hold others beside them."""
    if parse_name(path.name) is None or path.name.endswith(SUFFIX):
        raise UsageError("is no config file", file=path, field=field, fix="a file named E=..,N=..,device_name=...json")
    return path


def _outcome(row: dict[str, Any]) -> str:
    """What became of a row: its status, or `over-shared` where what was compiled cannot be launched."""
    return "over-shared" if row["status"] == "ok" and row.get("fits") is False else str(row["status"])


def _said(row: dict[str, Any]) -> str:
    """A row that is not well, in a line: which, and why."""
    size = "" if row.get("batch_size") is None else f", M={row['batch_size']}"
    why = row.get("error") or f"{row['shared']:,} bytes of shared memory are more than the target has"
    line = "" if row.get("line") is None else f":{row['line']}"
    return f"{row.get('file') or row.get('variant') or row.get('kernel')}{line}{size} for {row.get('target')}: {why}"


def _counted(rows: Sequence[dict[str, Any]]) -> str:
    """How many rows of each outcome, and a line for each reason why a file was skipped."""
    counts = _counts(rows)
    reasons = Counter(row["error"] for row in rows if row["status"] == "skipped" and "file" in row)
    words = ", ".join(f"{count} {status}" for status, count in counts.items())
    nothing = "; nothing was compiled" if reasons and set(counts) == {"skipped"} else ""
    return "\n".join([words + nothing, *(f"  {count} skipped: {reason}" for reason, count in reasons.items())])


def _counts(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    return dict(Counter(map(_outcome, rows)))


def _progress(quiet: bool) -> Any:
    return (lambda line: None) if quiet else (lambda line: print(line, file=sys.stderr))
