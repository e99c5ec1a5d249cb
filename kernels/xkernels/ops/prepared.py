"""Expert weights in the kernels' layout, made once at load time."""

from __future__ import annotations

import importlib.util
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from xkernels.ops._details.common import cdiv
from xkernels.ops.activation import SILU, Activation
from xkernels.ops.scheme import BLOCK_K, MXFP4_GROUP, NONE, Scheme

GROUP = 8  # gate and up rows alternate in groups of this many: one thread then holds a gate and its up value
_MXFP4_ALIGN = 64  # intermediate sizes are padded to this: whole groups of 32 for any tile of the down projection
_MAX_DESCRIPTORS = 32


class Descriptors:
    """Tensor descriptors of constant weights, owned by the weights: bounded, thread-safe, freed with them."""

    def __init__(self, limit: int = _MAX_DESCRIPTORS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._made: OrderedDict[tuple[str, int, int], Any] = OrderedDict()

    def get(self, name: str, weight: torch.Tensor, rows: int, cols: int) -> Any:
        """The descriptor of `weight` [.., K] seen as a matrix, for tiles of [rows, cols]; least recently used go."""
        key = (name, rows, cols)
        with self._lock:
            made = self._made.get(key)
            if made is None:
                made = make_descriptor(weight.view(-1, weight.shape[-1]), rows, cols)
                self._made[key] = made
                if len(self._made) > self._limit:
                    self._made.popitem(last=False)
            self._made.move_to_end(key)
            return made

    def __len__(self) -> int:
        return len(self._made)


def make_descriptor(matrix: torch.Tensor, rows: int, cols: int) -> Any:
    """A Triton tensor descriptor of a 2-D tensor for tiles of [rows, cols]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols])


@cache
def has_descriptors() -> bool:
    """Whether the installed Triton takes descriptors from the host (Intel's 3.3, which compiles for bmg, does not)."""
    return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None


def can_describe(matrix: torch.Tensor) -> bool:
    """Whether a descriptor may point at this tensor: 16-byte aligned start and rows, unit stride along them."""
    size = matrix.element_size()
    if not has_descriptors():
        return False
    return matrix.stride(-1) == 1 and matrix.data_ptr() % 16 == 0 and (matrix.stride(-2) * size) % 16 == 0


@dataclass(frozen=True, eq=False)
class PreparedExperts:
    """Expert weights in the kernels' layout; the checkpoint's tensors are never changed.

    `w1` [E, 2 * padded, H]: gate and up rows interleaved in groups of eight. `w2` [E, H, K]. Scales by scheme:

    - `none`: none;
    - `fp8_tensor`, `fp8_channel`: float32 per weight row, `w1_scale` [E, 2 * padded], `w2_scale` [E, H];
    - `fp8_block`: float32, `w1_scale` [E, 2 * padded / 8, blocks of H], `w2_scale` [E, blocks of H, blocks of N];
    - `mxfp4`: uint8 pairs, `w1` [E, 2 * padded, H / 2], `w2` [E, H, padded / 2]; uint8 e8m0 scales of 32 columns.

    `b1` [E, 2 * padded] in w1's order, `b2` [E, H], or None. `intermediate` is the unpadded N: config names use it.
    """

    w1: torch.Tensor
    w2: torch.Tensor
    w1_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    b1: torch.Tensor | None
    b2: torch.Tensor | None
    scheme: Scheme
    num_experts: int
    hidden: int
    intermediate: int
    activation: Activation
    descriptors: Descriptors = field(default_factory=Descriptors, repr=False)

    @property
    def padded(self) -> int:
        """Intermediate size after padding."""
        return self.w1.shape[1] // 2

    @property
    def down_k(self) -> int:
        """Columns of the down projection's weights, in values."""
        return self.w2.shape[2] * (2 if self.scheme.kind == "mxfp4" else 1)


def prepare_experts(
    w1: torch.Tensor,
    w2: torch.Tensor,
    *,
    scheme: Scheme = NONE,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    activation: Activation = SILU,
    gate_up_interleaved: bool = False,
    intermediate: int | None = None,
) -> PreparedExperts:
    """Bring expert weights into the kernels' layout (once, at load time).

    w1 [E, 2N, H]: N gate rows, then N up rows (gate_up_interleaved: alternating, as GPT-OSS stores them); w2
    [E, H, N]; b1 [E, 2N]; b2 [E, H]. Unquantised weights are float32, float16 or bfloat16; FP8 ones float8; MXFP4
    ones uint8 with two values per byte along the last dimension. Scales as checkpoints have them: per tensor [E] or
    [E, 2] (gate, up); per channel [E, rows] or [E, rows, 1]; per block of [128, 128] [E, rows / 128, cols / 128], with
    H and N multiples of 128; MXFP4 uint8 or float8_e8m0fnu [E, rows, cdiv(cols, 32)], with H a multiple of 32.
    `intermediate`: true N where the checkpoint's tensors are padded; padding is dropped. The scheme decides, not the
    weights' dtype. Raises ValueError when shapes, dtypes and scheme do not fit together.
    """
    pack = 2 if scheme.kind == "mxfp4" else 1
    _check_weights(w1, w2, b1, b2, scheme, pack)
    experts, hidden, given = w2.shape[0], w2.shape[1], w2.shape[2] * pack
    n = given if intermediate is None else intermediate
    if not 0 < n <= given:
        raise ValueError(f"intermediate must be 1 to {given}, not {n}")
    w1 = _halves(w1, given, n, gate_up_interleaved)
    b1 = None if b1 is None else interleave(_halves(b1, given, n, gate_up_interleaved), _align(scheme))
    s1, s2 = _prepare_scales(scheme, w1_scale, w2_scale, w1, w2, given, n, gate_up_interleaved)
    if pack == 2:
        w2 = _pad_columns(w2, cdiv(n, 2), cdiv(n, _MXFP4_ALIGN) * _MXFP4_ALIGN // 2)
        w2 = _clear_odd_nibble(w2, n)
    else:
        w2 = w2[:, :, :n].contiguous()
    return PreparedExperts(
        interleave(w1, _align(scheme)), w2, s1, s2, b1, None if b2 is None else b2.contiguous(), scheme, experts,
        hidden, n, activation,
    )  # fmt: skip


def _align(scheme: Scheme) -> int:
    return _MXFP4_ALIGN if scheme.kind == "mxfp4" else GROUP


def interleave(w1: torch.Tensor, align: int = GROUP) -> torch.Tensor:
    """[E, 2N, ...] with gate rows before up rows -> [E, 2 * padded N, ...] alternating in groups of eight.

    N is padded with zero rows to a multiple of `align`, itself a multiple of eight.
    """
    experts, rows = w1.shape[0], w1.shape[1] // 2
    tail = w1.shape[2:]
    padded = cdiv(rows, align) * align
    out = torch.zeros(experts, 2, padded, *tail, dtype=_plain(w1).dtype, device=w1.device)
    out[:, 0, :rows] = _plain(w1)[:, :rows]
    out[:, 1, :rows] = _plain(w1)[:, rows:]
    grouped = out.view(experts, 2, padded // GROUP, GROUP, *tail).transpose(1, 2)
    return grouped.reshape(experts, 2 * padded, *tail).view(w1.dtype)


def deinterleave(w1: torch.Tensor, rows: int) -> torch.Tensor:
    """The inverse of `interleave`: [E, 2 * rows, ...], gate rows first."""
    experts, tail = w1.shape[0], w1.shape[2:]
    grouped = _plain(w1).view(experts, -1, 2, GROUP, *tail).transpose(1, 2)
    halves = grouped.reshape(experts, 2, -1, *tail)[:, :, :rows]
    return halves.reshape(experts, 2 * rows, *tail).view(w1.dtype)


def _plain(t: torch.Tensor) -> torch.Tensor:
    """FP8 tensors as bytes: torch moves and fills bytes on every device."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def _halves(t: torch.Tensor, given: int, n: int, interleaved: bool) -> torch.Tensor:
    """[E, 2 * given, ...] in the checkpoint's order -> [E, 2 * n, ...], gate rows first."""
    p = _plain(t)
    if interleaved:
        gate, up = p[:, 0 : 2 * n : 2], p[:, 1 : 2 * n : 2]
    else:
        gate, up = p[:, :n], p[:, given : given + n]
    return torch.cat([gate, up], 1).view(t.dtype)


def _pad_columns(t: torch.Tensor, used: int, size: int, value: int = 0) -> torch.Tensor:
    out = t.new_full((*t.shape[:-1], size), value)
    out[..., :used] = t[..., :used]
    return out


def _clear_odd_nibble(w2: torch.Tensor, n: int) -> torch.Tensor:
    if n % 2:
        w2[..., n // 2] &= 0x0F
    return w2


def _prepare_scales(
    scheme: Scheme,
    s1: torch.Tensor | None,
    s2: torch.Tensor | None,
    w1: torch.Tensor,
    w2: torch.Tensor,
    given: int,
    n: int,
    interleaved: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Scales in the layout of `PreparedExperts`; w1 has its gate rows first already."""
    if scheme.kind == "none":
        if s1 is not None or s2 is not None:
            raise ValueError("unquantised weights take no scales: name the scheme")
        return None, None
    if s1 is None or s2 is None:
        raise ValueError(f"scheme {scheme.kind} needs w1_scale and w2_scale")
    experts, hidden = w2.shape[0], w2.shape[1]
    if scheme.kind == "mxfp4":
        s1, s2 = _exponents("w1_scale", s1), _exponents("w2_scale", s2)
        _divides(MXFP4_GROUP, "hidden size", hidden, scheme)
        _expect("w1_scale", s1, (experts, 2 * given, hidden // MXFP4_GROUP))
        _expect("w2_scale", s2, (experts, hidden, cdiv(given, MXFP4_GROUP)))
        padded = cdiv(n, _MXFP4_ALIGN) * _MXFP4_ALIGN // MXFP4_GROUP
        rows = interleave(_halves(s1, given, n, interleaved), _MXFP4_ALIGN)
        return rows, _pad_columns(s2, cdiv(n, MXFP4_GROUP), padded, 127)
    s1, s2 = _factors("w1_scale", s1), _factors("w2_scale", s2)
    if scheme.kind == "fp8_block":
        return _block_scales(scheme, s1, s2, w2, given, n, interleaved)
    rows1 = _gate_up_scales(s1, experts, given, n, interleaved)
    return interleave(rows1), _row_scales("w2_scale", s2, experts, hidden).contiguous()


def _exponents(name: str, s: torch.Tensor) -> torch.Tensor:
    """MXFP4's scales as the kernels read them: bytes of e8m0."""
    if s.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ValueError(f"{name} of mxfp4 must be uint8 or float8_e8m0fnu, not {s.dtype}")
    return s.view(torch.uint8)


def _factors(name: str, s: torch.Tensor) -> torch.Tensor:
    """FP8's scales as float32."""
    if not s.dtype.is_floating_point:
        raise ValueError(f"{name} must be a floating-point tensor, not {s.dtype}")
    return s.float()


def _divides(group: int, name: str, size: int, scheme: Scheme) -> None:
    """Refuse a size with a rest beside its groups of scales: whether a kernel took that would depend on its tile."""
    if size % group:
        raise ValueError(f"{name} must be a multiple of {group} with scheme {scheme.kind}, not {size}")


def _block_scales(
    scheme: Scheme, s1: torch.Tensor, s2: torch.Tensor, w2: torch.Tensor, given: int, n: int, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if scheme.block != (BLOCK_K, BLOCK_K):
        raise ValueError(f"fused experts take weight blocks of [{BLOCK_K}, {BLOCK_K}], not {list(scheme.block or ())}")
    if interleaved or n != given:
        raise ValueError("fp8_block weights must be unpadded, gate rows before up rows")
    experts, hidden = w2.shape[0], w2.shape[1]
    _divides(BLOCK_K, "hidden size", hidden, scheme)
    _divides(BLOCK_K, "intermediate size", n, scheme)
    _expect("w1_scale", s1, (experts, 2 * n // BLOCK_K, hidden // BLOCK_K))
    _expect("w2_scale", s2, (experts, hidden // BLOCK_K, n // BLOCK_K))
    rows = s1[:, torch.arange(2 * n, device=s1.device) // BLOCK_K]
    return interleave(rows)[:, ::GROUP].contiguous(), s2.contiguous()


def _gate_up_scales(s: torch.Tensor, experts: int, given: int, n: int, interleaved: bool) -> torch.Tensor:
    """One scale per row of w1 [E, 2 * n], gate rows first, from scales per tensor ([E], or [E, 2]) or per channel."""
    s = s[:, :, 0] if s.ndim == 3 and s.shape[2] == 1 else s
    if s.shape == (experts, 2):  # of the gate and of the up projection, however the checkpoint's rows alternate
        return s.repeat_interleave(n, dim=1)
    return _halves(_row_scales("w1_scale", s, experts, 2 * given), given, n, interleaved)


def _row_scales(name: str, s: torch.Tensor, experts: int, rows: int) -> torch.Tensor:
    """One scale per weight row from scales per tensor [E] or per channel."""
    s = s[:, :, 0] if s.ndim == 3 and s.shape[2] == 1 else s
    if s.shape == (experts,):
        return s[:, None].expand(experts, rows)
    _expect(name, s, (experts, rows))
    return s


def _expect(name: str, t: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(t.shape) != shape:
        raise ValueError(f"{name} must be {list(shape)}, not {list(t.shape)}")


def _check_weights(
    w1: torch.Tensor, w2: torch.Tensor, b1: torch.Tensor | None, b2: torch.Tensor | None, scheme: Scheme, pack: int
) -> None:
    if w1.ndim != 3 or w2.ndim != 3 or w1.shape != (w2.shape[0], 2 * w2.shape[2] * pack, w2.shape[1] // pack):
        raise ValueError(f"w1 must be [E, 2N, H] and w2 [E, H, N], not {list(w1.shape)} and {list(w2.shape)}")
    if w1.dtype != w2.dtype:
        raise ValueError(f"w1 and w2 must have one dtype, not {w1.dtype} and {w2.dtype}")
    wanted = {"none": (torch.float32, torch.float16, torch.bfloat16), "mxfp4": (torch.uint8,)}.get(
        scheme.kind, (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    )
    if w1.dtype not in wanted:
        raise ValueError(f"scheme {scheme.kind} has weights of {' or '.join(map(str, wanted))}, not {w1.dtype}")
    for name, bias, size in (("b1", b1, w1.shape[1]), ("b2", b2, w2.shape[1])):
        if bias is not None and bias.shape != (w1.shape[0], size):
            raise ValueError(f"{name} must be [{w1.shape[0]}, {size}], not {list(bias.shape)}")
