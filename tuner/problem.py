"""What is tuned: one op at one shape and dtype, from a model's config or from the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from moegate.canonical import whole
from moegate.configs import ConfigKey
from moegate.errors import UsageError

__all__ = ["DTYPES", "OPS", "SHAPE_FIELDS", "SHORT_DTYPES", "Problem", "Projection", "parse_shape"]

Projection = Literal["up", "down", "main"]

DTYPES = ("float32", "bfloat16", "float16", "fp8_w8a8")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "fp8_w8a8"}
"""Other names of them that people and recordings use."""

OPS: dict[str, tuple[Projection, ...]] = {
    "fused_experts": ("up", "down"),
    "block_fp8_linear": ("main",),
    "store_kv_cache": ("main",),
}
"""Every tunable op with the kernels that are timed apart."""

SHAPE_FIELDS: dict[str, tuple[str, ...]] = {
    "fused_experts": ("E", "N", "H", "topk"),
    "block_fp8_linear": ("N", "K"),
    "store_kv_cache": ("heads", "dim"),
}
"""What a shape on the command line says of each op."""

_OPTIONAL: dict[str, tuple[str, ...]] = {
    "fused_experts": ("block_n", "block_k", "shared", "ep"),
    "block_fp8_linear": ("block_n", "block_k"),
}


@dataclass(frozen=True)
class Problem:
    """One op at one shape.

    For `fused_experts`: `E` experts of one rank (shared-expert slots included), `N` intermediate size of one rank, `H`
    hidden size, `topk` experts per token. For a dense linear `N` x `H` is the weight. `dtype` is the activation's, or
    the quantisation scheme (`fp8_w8a8`, then bf16 activations are quantised). `shared` of the `topk` slots always go to
    the last `shared` experts (fused shared experts). Under expert parallelism (`ep` ranks) tokens choose among the
    routed experts of all ranks, and most of their slots go elsewhere.
    """

    op: str
    E: int
    N: int
    H: int
    topk: int
    dtype: str
    block_shape: tuple[int, int] | None = None
    shared: int = 0
    ep: int = 1

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise UsageError(f"unknown op {self.op!r}", field="--op", fix=f"one of {', '.join(OPS)}")
        if self.dtype not in DTYPES:
            raise UsageError(f"unknown dtype {self.dtype!r}", field="--dtype", fix=f"one of {', '.join(DTYPES)}")
        if self.shared and self.shared >= min(self.topk, self.E):
            words = f"{self.shared} shared experts leave none of {self.E}, or no slot of {self.topk}, to choose"
            raise UsageError(words, field="--shape", fix="shared below E and topk")
        if self.topk - self.shared > self.routed * self.ep:
            raise UsageError(f"topk {self.topk} is more than the {self.E} experts", field="--shape")

    @property
    def routed(self) -> int:
        """This rank's experts that tokens choose, without shared ones."""
        return self.E - self.shared

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The kernels that are timed apart."""
        return OPS[self.op]

    @property
    def activation_dtype(self) -> str:
        """torch's name of the activations' dtype."""
        return "bfloat16" if self.dtype.startswith("fp8") else self.dtype

    @property
    def file_dtype(self) -> str | None:
        """The dtype field of the config file's name."""
        return None if self.dtype in ("bfloat16", "float16") else self.dtype

    def key(self, device_name: str) -> ConfigKey:
        """The key under which the tuned config is looked up."""
        return ConfigKey(self.E, self.N, device_name.replace(" ", "_"), self.file_dtype, self.block_shape)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        return {
            "op": self.op,
            "E": self.E,
            "N": self.N,
            "H": self.H,
            "topk": self.topk,
            "dtype": self.dtype,
            "block_shape": list(self.block_shape) if self.block_shape else None,
            "shared": self.shared,
            "ep": self.ep,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Problem:
        """Inverse of `as_dict`."""
        block = values.get("block_shape")
        return cls(**{**values, "block_shape": tuple(block) if block else None})

    def with_dtype(self, dtype: str | None) -> Problem:
        """The same shape in another dtype (None keeps it)."""
        if dtype is None or dtype == self.dtype:
            return self
        return replace(self, dtype=dtype, block_shape=self.block_shape if dtype.startswith("fp8") else None)


_MOST = 1 << 30


def parse_shape(text: str, op: str, dtype: str) -> Problem:
    """Read `E=64,N=896,H=1280,topk=6[,block_n=128,block_k=128][,shared=1][,ep=2]`, one rank's.

    Raises:
        UsageError: a field is missing, unknown, twice or no positive number.
    """
    if op not in OPS:
        raise UsageError(f"unknown op {op!r}", field="--op", fix=f"one of {', '.join(OPS)}")
    needed = SHAPE_FIELDS[op]
    known = needed + _OPTIONAL.get(op, ())
    values: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in known or name in values:
            raise UsageError(
                f"{part.strip()!r} is no field of this shape", field="--shape", fix=f"give {', '.join(needed)}"
            )
        value = whole(number, 0 if name == "shared" else 1, _MOST)
        if value is None:
            raise UsageError(f"{name} must be a positive number, not {number!r:.40}", field="--shape")
        values[name] = value
    if missing := [name for name in needed if name not in values]:
        raise UsageError(f"lacks {', '.join(missing)}", field="--shape", fix=f"give {', '.join(needed)}")
    block = None
    if "block_n" in values or "block_k" in values:
        block = (values.get("block_n", 0), values.get("block_k", 0))
        if not all(block):
            raise UsageError("block_n and block_k come together", field="--shape")
    if op == "block_fp8_linear":
        return Problem(op, 1, values["N"], values["K"], 1, "fp8_w8a8", block or (128, 128))
    if op == "store_kv_cache":
        return Problem(op, 1, values["heads"], values["dim"], 1, dtype)
    shared, ep = values.get("shared", 0), values.get("ep", 1)
    return Problem(op, values["E"], values["N"], values["H"], values["topk"], dtype, block, shared, ep)
