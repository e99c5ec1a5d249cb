"""What dispatch is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from moegate.configs.names import DTYPES as _FILE_DTYPES
from moegate.errors import UsageError

# The words of a problem's fields. What kernels serve of them is for the rows to say.
DTYPES = ("bfloat16", "float16", "float32")
QUANTS = tuple(sorted((_FILE_DTYPES["sglang"] | _FILE_DTYPES["vllm"] | {"mxfp8"}) - {"float32"}))
ACTIVATIONS = ("silu", "swiglu", "clamped", "silu_rounded", "situ", "gelu", "gelu_tanh", "relu2")
A2A = ("none", "deepep", "mooncake", "nixl", "mori", "ascend_fuseep", "flashinfer", "megamoe")
_WORDS: Mapping[str, tuple[str, ...]] = {"dtype": DTYPES, "quant": QUANTS, "activation": ACTIVATIONS, "a2a": A2A}


@dataclass(frozen=True)
class Capabilities:
    """What a process can do: its platform and what is installed. Built by hand to ask about a machine that is not here.

    Args:
        platform: a name of `platforms.NAMES`.
        torch, triton: version texts; None where absent.
        interpreter: Triton's interpreter is on.
        packages: importable kernel packages by name (`deep_gemm`, `flashinfer`, `aiter`, `cutlass`, ...).
        env: variables that switch rows on or off, with their values.
        driver: driver version, where a row depends on it.
        probes: named facts found out on the live device (`scaled_mm_block` ...): absent means not probed.
        ask: finds out a fact that `probes` has not, on the live device; None where there is none to ask. It is called
            only for a row that nothing else stands in the way of, and remembers its answers itself.
    """

    platform: str
    torch: str | None = None
    triton: str | None = None
    interpreter: bool = False
    packages: frozenset[str] = frozenset()
    env: tuple[tuple[str, str], ...] = ()
    driver: str = ""
    probes: tuple[tuple[str, bool], ...] = ()
    ask: Callable[[str], bool | None] | None = field(default=None, compare=False, repr=False)

    def flag(self, name: str, default: bool = False) -> bool:
        """Whether the variable `name` is switched on."""
        return dict(self.env).get(name, "1" if default else "0").strip().lower() in {"1", "true", "yes", "on"}

    def probe(self, name: str) -> bool | None:
        """A fact found on the device, None where nobody looked."""
        told = dict(self.probes).get(name)
        return told if told is not None or self.ask is None else self.ask(name)

    @property
    def driver_major(self) -> int | None:
        """The first number of the driver's version, None where it is not known."""
        first = self.driver.split(".")[0].strip()
        return int(first) if first.isdecimal() else None

    def torch_at_least(self, major: int, minor: int) -> bool:
        """Whether torch is there and new enough."""
        parts = (self.torch or "").split("+")[0].split(".")
        try:
            return (int(parts[0]), int(parts[1])) >= (major, minor)
        except (ValueError, IndexError):
            return False


@dataclass(frozen=True)
class Problem:
    """What is to be computed, as far as a choice of backend depends on it.

    Args:
        dtype: activation dtype, one of `DTYPES`.
        quant: scheme of the weights, one of `QUANTS`; None for weights as they are.
        block_shape: (n, k) of block scales, None for per tensor or per channel; a list is as good as a tuple.
        per_channel: per-channel weight scales.
        activation: one of `ACTIVATIONS`.
        ue8m0: scales are powers of two.
        a2a: expert-parallel all-to-all backend, one of `A2A`; `none` outside expert parallelism.
        payload, payload_scales: dtype of the rows that come over it, and whether scales come with them.
        experts, topk, groups, batch_size, hidden: sizes; 0 where unknown.

    Raises:
        UsageError: a word that no field has, naming the field and its words; a block that is no two numbers.
    """

    dtype: str = "bfloat16"
    quant: str | None = None
    block_shape: tuple[int, int] | None = None
    per_channel: bool = False
    activation: str = "silu"
    ue8m0: bool = False
    a2a: str = "none"
    experts: int = 0
    topk: int = 0
    groups: int = 1
    batch_size: int = 0
    hidden: int = 0
    payload: str = "bfloat16"
    payload_scales: bool = False

    def __post_init__(self) -> None:
        for name, known in _WORDS.items():
            value = getattr(self, name)
            if value not in known and not (name == "quant" and value is None):
                raise UsageError(f"unknown {name} {value!r:.60}", field=name, fix=f"one of {', '.join(known)}")
        if self.block_shape is not None:
            block = tuple(self.block_shape)
            if len(block) != 2:
                raise UsageError(f"is {list(block)!r:.60}", field="block_shape", fix="two integers, such as (128, 128)")
            object.__setattr__(self, "block_shape", block)


Condition = Callable[[Problem, Capabilities], str | None]
"""Says why a row cannot serve, or None where it can."""


@dataclass(frozen=True)
class Row:
    """One backend of one op. Rows are tried in table order; the last row of every op is its reference.

    Args:
        backend: the name that users type.
        platforms: where the row may run at all.
        when: why it cannot serve a problem, or None. Every condition of `conditions` is one.
        reason: why it stands where it stands: a measured result, or `unmeasured`.
        here: whether its kernel is ours; a row of another package says which one it needs and cannot run here.
        auto: on which of its platforms `auto` may take it; None is all of them.
        auto_when: what has to hold besides for `auto` to take it.
        asks: conditions that are asked of the live device, after everything else and only where all of it holds.
    """

    op: str
    backend: str
    platforms: frozenset[str]
    when: tuple[Condition, ...] = ()
    reason: str = "unmeasured"
    here: bool = True
    auto: frozenset[str] | None = None
    auto_when: tuple[Condition, ...] = ()
    asks: tuple[Condition, ...] = ()


@dataclass(frozen=True)
class Step:
    """One row that selection looked at, whether it was chosen, and why or why not."""

    backend: str
    chosen: bool
    why: str


@dataclass(frozen=True)
class Selection:
    """The answer of dispatch: what was asked, what it became, and every row that was looked at on the way."""

    op: str
    platform: str
    requested: str
    resolved: str
    chain: tuple[Step, ...] = field(default_factory=tuple)


class DispatchRefused(UsageError):
    """A request that cannot be honoured. It is never replaced by something else; `chain` says what was looked at."""

    def __init__(self, message: str, *, chain: tuple[Step, ...] = (), fix: str | None = None) -> None:
        self.chain = chain
        super().__init__(message, field="backend", fix=fix)
