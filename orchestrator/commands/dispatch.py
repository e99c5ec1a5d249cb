"""`orchestrator dispatch`: which kernel would serve, the lock on that, and what an engine's source says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["register"]

_SHOW = """\b
Examples:
  orchestrator dispatch show --op fused_experts --platform xpu-bmg
  orchestrator dispatch show --op block_fp8_linear --platform sm_90 --block 128,128 --package deep_gemm
"""
_LOCK = "Example: orchestrator dispatch lock --check"
_DIFF = "Example: orchestrator dispatch diff --base git:origin/main"
_EXTRACT = """\b
Examples:
  orchestrator dispatch extract --source sglang/ --base git:origin/main
  orchestrator dispatch extract --source new/ --base old/ --json
"""

_JSON = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(
        name="dispatch",
        help="Which kernel would serve: ours as a locked table, an engine's read from its source.",
        epilog="Example: orchestrator dispatch show --op fused_experts --platform sm_90",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    group.command("show", epilog=_SHOW)(show)
    group.command("lock", epilog=_LOCK)(lock)
    group.command("diff", epilog=_DIFF)(diff)
    group.command("extract", epilog=_EXTRACT)(extract)
    app.add_typer(group)


def show(
    op: Annotated[str, typer.Option(help="The op, such as fused_experts.")],
    platform: Annotated[str, typer.Option(help="cuda-sm90, sm_90, gfx942, bmg, cpu, .. or a device's name.")],
    request: Annotated[str, typer.Option(help="auto, or a backend by name.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Activation dtype.")] = "bfloat16",
    quant: Annotated[
        str | None, typer.Option(help="Scheme of the weights, such as fp8_w8a8; default: an FP8 op's own, else none.")
    ] = None,
    block: Annotated[str | None, typer.Option(metavar="N,K", help="Block of scales; default: as for --quant.")] = None,
    per_channel: Annotated[bool, typer.Option("--per-channel", help="A scale per channel of the weights.")] = False,
    ue8m0: Annotated[bool, typer.Option("--ue8m0", help="The scales are powers of two.")] = False,
    activation: Annotated[str, typer.Option(help="Between the projections of experts.")] = "silu",
    experts: Annotated[int, typer.Option(min=0, help="Number of experts; 0: unknown.")] = 0,
    groups: Annotated[int, typer.Option(min=1, help="Groups that the router chooses experts from.")] = 1,
    package: Annotated[list[str] | None, typer.Option(help="A kernel package taken as installed.")] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A setting taken as made.")] = None,
    torch: Annotated[str, typer.Option(help="The torch version taken as installed.")] = "2.13.0",
    triton: Annotated[str, typer.Option(help="The Triton version taken as installed.")] = "3.8.0",
    as_json: _JSON = False,
) -> None:
    """Show what a request comes to on a platform, and every row that was looked at on the way."""
    from moegate.dispatch import Capabilities, DispatchRefused, Problem, select
    from moegate.dispatch.lock import usual

    name = _platform(platform)
    pairs = tuple(_pair(text) for text in env or ())
    caps = Capabilities(name, torch, triton, name == "cpu", frozenset(package or ()), pairs)
    own = usual(op)
    problem = Problem(
        dtype=dtype, quant=own.quant if quant is None else quant, block_shape=_block(block) or own.block_shape,
        per_channel=per_channel, activation=activation, ue8m0=ue8m0, experts=experts, groups=groups,
    )  # fmt: skip
    try:
        found = select(op, problem, caps, request)
    except DispatchRefused as refused:
        _print_selection(op, name, request, None, refused.chain, as_json=as_json, refused=str(refused))
        raise typer.Exit(2) from None
    _print_selection(op, name, request, found.resolved, found.chain, as_json=as_json)


def _platform(text: str) -> str:
    """The platform that `text` names, itself or by one of its devices.

    Raises:
        UsageError: neither is known by that name.
    """
    from moegate import devices
    from moegate.dispatch import PLATFORM_NAMES, platform_name
    from moegate.errors import UsageError

    device = devices.find(text)
    if device is not None:
        return device.platform
    if devices.vendor_of(text) is None or (unknown := devices.unknown(text)) is None:
        return platform_name(text)
    raise UsageError(unknown, field="platform", fix=f"a device that is, or one of {', '.join(PLATFORM_NAMES)}")


def _print_selection(
    op: str, platform: str, request: str, resolved: str | None, chain: Any, *, as_json: bool, refused: str | None = None
) -> None:
    from orchestrator.commands._output import emit_json

    if as_json:
        steps = [{"backend": s.backend, "chosen": s.chosen, "why": s.why} for s in chain]
        document = {"op": op, "platform": platform, "requested": request, "resolved": resolved, "chain": steps}
        emit_json(document if refused is None else {**document, "refused": refused})
        return
    print(f"{op} on {platform}, {request}: {resolved or f'refused: {refused}'}")
    for step in chain:
        print(f"  {'->' if step.chosen else '  '} {step.backend}: {step.why}")


def lock(
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether the lock is up to date; exit 1 if not.")
    ] = False,
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="The lock file; default: ours.")] = None,
    as_json: _JSON = False,
) -> None:
    """Write what every op x platform x request comes to, or check that nothing changed."""
    from moegate.dispatch import lock as locking
    from orchestrator.commands._output import emit_json

    path = file or _lock_path()
    if check:
        before, now = locking.read(path), locking.table()
        changes, families = locking.diff(before, now), locking.family_changes(before, now)
        _print_changes(changes, families, as_json=as_json, none=f"{path} is up to date")
        raise typer.Exit(1 if changes or families else 0)
    locking.write(path)
    if as_json:
        emit_json({"written": str(path)})
    else:
        print(f"wrote {path}")


def diff(
    base: Annotated[str, typer.Option(metavar="FILE|DIR|git:REF", help="The lock to compare with.")] = "git:HEAD",
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="The lock file; default: ours.")] = None,
    as_json: _JSON = False,
) -> None:
    """Show how the table as it is differs from a lock: both answers with their chains. Exit 1 on any difference."""
    from moegate.dispatch import lock as locking
    from moegate.errors import UsageError
    from orchestrator.check.base import open_base

    path = (file or _lock_path()).resolve()
    if Path(base).is_file():
        before = locking.read(Path(base))
    else:
        with open_base(base, [path], Path.cwd()) as found:
            other = found.locate(path)
            if other is None or not other.is_file():
                raise UsageError("has no dispatch lock", file=base, field="--base", fix="name a lock file")
            before = locking.read(other)
    now = locking.table()
    changes, families = locking.diff(before, now), locking.family_changes(before, now)
    _print_changes(changes, families, as_json=as_json, none=f"no difference to {base}")
    raise typer.Exit(1 if changes or families else 0)


def _print_changes(changes: Any, families: Any, *, as_json: bool, none: str) -> None:
    from dataclasses import asdict

    from orchestrator.commands._output import emit_json

    if as_json:
        drifts = [{"architecture": name, "before": was, "after": says} for name, was, says in families]
        emit_json({"changes": [{**asdict(c), "words": c.words} for c in changes], "families": drifts})
        return
    if not changes and not families:
        print(none)
    for name, was, says in families:
        print(f"{name}: {was} -> {says}")
    for change in changes:
        print(change.words)
        if isinstance(change.before, list) or isinstance(change.after, list):
            print(f"  before: {_chain(change.before)}\n  after:  {_chain(change.after)}")


def _chain(answer: Any) -> str:
    return " > ".join(answer) if isinstance(answer, list) else str(answer)


def extract(
    source: Annotated[Path, typer.Option(metavar="TREE", help="The engine's checkout or unpacked wheel.")],
    base: Annotated[str | None, typer.Option(metavar="TREE|git:REF", help="Say what changed against this one.")] = None,
    engine: Annotated[str | None, typer.Option(help="sglang or vllm; default: found out.")] = None,
    as_json: _JSON = False,
) -> None:
    """Read an engine's dispatch from its source without importing it. Exit 1 on a shadowed request or a changed row."""
    from orchestrator.check.dispatching import extraction_json, source_findings
    from orchestrator.check.files import shown_path
    from orchestrator.commands._output import emit_json

    start = Path.cwd()
    extraction, found = source_findings(source, engine, base, lambda path: shown_path(path, start))
    if as_json:
        emit_json(extraction_json(extraction, found))
    else:
        _print_extraction(extraction)
        for item in found:
            print(f"{item.severity}: {item.file}:{item.line}: {item.message} (fix: {item.fix})")
    raise typer.Exit(1 if any(item.severity == "error" for item in found) else 0)


def _print_extraction(extraction: Any) -> None:
    for function in extraction.functions:
        print(f"{function.file}:{function.line}: {function.name}")
        for row in function.rows:
            print(f"  {row.line:>6}  {row.condition} -> {row.target}")
    for watched in extraction.missing:
        print(f"not in this tree: {watched.file}: {watched.name}")


def _lock_path() -> Path:
    from moegate.errors import UsageError
    from moegate.paths import config_root

    root = config_root()
    path = next((p for p in (root.parent / "dispatch.lock.json", root / "dispatch.lock.json") if p.is_file()), None)
    if path is not None:
        return path
    if root.name == "configs" and root.is_dir():
        return root.parent / "dispatch.lock.json"
    raise UsageError("no lock file is installed here", field="--file", fix="name one")


def _block(text: str | None) -> tuple[int, int] | None:
    from moegate.canonical import whole
    from moegate.errors import UsageError

    if text is None:
        return None
    rows, _, columns = text.partition(",")
    block = whole(rows.strip(), 1, 1 << 20), whole(columns.strip(), 1, 1 << 20)
    if block[0] is None or block[1] is None:
        raise UsageError(f"is {text!r:.40}", field="--block", fix="two integers, such as 128,128")
    return block[0], block[1]


def _pair(text: str) -> tuple[str, str]:
    from moegate.errors import UsageError

    name, separator, value = text.partition("=")
    if not separator or not name:
        raise UsageError(f"is {text!r:.60}", field="--env", fix="NAME=VALUE")
    return name, value
