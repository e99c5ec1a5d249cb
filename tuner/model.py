"""From a model's config.json, or a shape on the command line, to the problem that is tuned."""

from __future__ import annotations

from pathlib import Path

from moegate.errors import UsageError
from moegate.families import Quant, load_layout
from tuner.problem import DTYPES, OPS, SHAPE_FIELDS, SHORT_DTYPES, Problem, parse_shape

__all__ = ["problem_of"]


def problem_of(model: Path | None, shape: str | None, op: str, dtype: str, *, engine: str = "moegate", tp: int = 1,
               ep: int = 1) -> Problem:  # fmt: skip
    """The problem that the command line describes.

    Args:
        model: a Hugging Face config.json or its folder; exactly one of `model` and `shape`.
        shape: see `tuner.problem.parse_shape`.
        op: a name of `tuner.problem.OPS`.
        dtype: `auto` (the model's own), a torch dtype, or `fp8_w8a8`.
        engine: decides whether shared experts are fused (they then take part in the routing).
        tp: tensor-parallel size. ep: expert-parallel size.

    Raises:
        UsageError: neither or both of model and shape, a wrong value, or weights that nothing is tuned for.
    """
    if (model is None) == (shape is None):
        raise UsageError("give either --model or --shape", fix="--model DIR, or --shape E=64,N=896,H=1280,topk=6")
    dtype = SHORT_DTYPES.get(dtype, dtype)
    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}", field="--dtype", fix=f"auto or one of {', '.join(DTYPES)}")
    if shape is not None:
        if (tp, ep) != (1, 1):
            raise UsageError("a shape is one rank's: --tp and --ep are for a model", field="--tp" if tp > 1 else "--ep",
                             fix="--shape .. of one rank, with ,ep=.. where there are more")  # fmt: skip
        return parse_shape(shape, op, "bfloat16" if dtype == "auto" else dtype)
    assert model is not None
    if op in OPS and op != "fused_experts":
        raise UsageError(f"a model's config does not tell the shape of {op}", field="--op",
                         fix=f"--shape {'=..,'.join(SHAPE_FIELDS[op])}=..")  # fmt: skip
    layout = load_layout(model)
    shared = layout.fused_shared if engine == "sglang" else 0
    intermediate, experts = layout.shard(tp, ep)
    if dtype == "auto":
        dtype = layout.quant.dtype or layout.dtype
    _check_scheme(model, layout.quant, dtype)
    block = layout.quant.block_shape if dtype == "fp8_w8a8" else None
    visible = (block[0], block[1]) if block is not None and all(block) else None
    return Problem(op, experts + shared, intermediate, layout.hidden, layout.topk + shared, dtype, visible, shared, ep)


def _check_scheme(model: Path, quant: Quant, dtype: str) -> None:
    """Refuse the model's own quantisation where no kernel of ours is tuned for it: its engine would look for a file of
    another name, and find nothing of what was tuned."""
    if dtype != quant.dtype or (dtype in DTYPES and not quant.per_channel):
        return
    scales = " with scales per channel" if quant.per_channel else ""
    raise UsageError(f"the experts are {dtype}{scales}, for which nothing can be tuned yet", file=str(model),
                     field="quantization_config", fix="--dtype bfloat16 takes them as not quantised")  # fmt: skip
