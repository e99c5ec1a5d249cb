"""`orchestrator explain`: which config file a model would really load, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["register"]

_EXAMPLE = """\b
Examples:
  orchestrator explain --model examples/models/deepseek-ocr-2 --device "Intel(R) Arc(TM) Pro B60 Graphics"
  orchestrator explain --model config.json --device NVIDIA_H200 --triton 3.6.0 --engine sglang --configs python/ --tp 8
"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain", epilog=_EXAMPLE)(explain)


def explain(
    model: Annotated[Path, typer.Option(metavar="PATH", help="A Hugging Face config.json or its folder.")],
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="The device as its driver prints it; default: this machine's.")
    ] = None,
    triton: Annotated[
        str | None, typer.Option(metavar="X.Y.Z", help="The Triton that will run; default: the installed one.")
    ] = None,
    engine: Annotated[str, typer.Option(help="Whose lookup: moegate, sglang or vllm.")] = "moegate",
    configs: Annotated[
        str | None, typer.Option(metavar="DIR", help="The config tree; default: ours; `none` for an empty one.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, max=4096, help="Tensor-parallel size.")] = 1,
    ep: Annotated[int, typer.Option(min=1, max=4096, help="Expert-parallel size.")] = 1,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16, float32, fp8_w8a8, ...; default: the model's own.")
    ] = None,
    m: Annotated[
        str, typer.Option("--m", metavar="M,...", help="Batch sizes; default: the 18 of the tuner, 1 to 4096.")
    ] = "",
    backend: Annotated[str, typer.Option(help="The MoE backend that will be asked for.")] = "auto",
    no_fusion: Annotated[
        bool, typer.Option("--disable-shared-experts-fusion", help="Keep the shared expert out of E.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say what both projections resolve to, what was searched, what they run with, and whether they are reached."""
    from orchestrator.check.explain import Question, answer, as_text
    from orchestrator.commands._output import emit_json

    question = Question(model, device, triton, engine, configs, tp, ep, dtype, _batch_sizes(m), backend, not no_fusion)
    document: dict[str, Any] = answer(question)
    if as_json:
        emit_json(document)
    else:
        print(as_text(document))


def _batch_sizes(text: str) -> tuple[int, ...]:
    from moegate.canonical import whole
    from moegate.configs import BATCH_SIZES
    from moegate.errors import UsageError

    if not text:
        return BATCH_SIZES
    sizes = [whole(part.strip(), 1, 10**9) for part in text.split(",")]
    known = tuple(size for size in sizes if size is not None)
    if len(known) < len(sizes):
        raise UsageError(f"is {text!r:.60}", field="--m", fix="positive integers, such as 1,16,256")
    return known
