"""What an adapter is: it builds operands, launches one projection with one config, and knows the right answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tuner.problem import Problem, Projection

__all__ = [
    "LIMITS",
    "QUANTISED_LIMITS",
    "THROUGH_FP8_LIMITS",
    "Adapter",
    "AdapterBase",
    "Batch",
    "Routes",
    "Verdict",
    "compare",
]

Routes = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Routings of one batch: pairs of weights float32 [M, topk] and ids int32 [M, topk]."""

LIMITS: Mapping[str, tuple[float, float]] = {
    "float32": (1e-4, 1e-5),
    "float16": (5e-3, 1e-3),
    "bfloat16": (2e-2, 4e-3),
    "fp8_w8a8": (2e-2, 4e-3),
}
"""Largest error over the largest magnitude, and RMS error over RMS magnitude, against the float32 twin."""

QUANTISED_LIMITS = (8e-2, 2.5e-2)
"""For outputs that are FP8 themselves: a value next to a rounding boundary may fall to its other side, 1/16 away."""

THROUGH_FP8_LIMITS = (3e-2, 1.5e-2)
"""For results behind an intermediate that was rounded to FP8. A matrix unit that adds FP8 products with fewer bits than
float32 has (an H200's: RMS 8e-3 seen) moves a few of every hundred values across a boundary; a scale that is applied to
the wrong block is off by a tenth and more."""


@dataclass(frozen=True)
class Verdict:
    """How far an output is from the reference. `ok` needs every element written and both limits kept."""

    ok: bool
    max_rel: float
    rms: float
    unwritten: int
    shown: str = ""

    @property
    def reason(self) -> str:
        """What is wrong, in words; empty where nothing is."""
        if self.ok:
            return ""
        if self.unwritten:
            return f"{self.unwritten} elements were not written or are not finite"
        return f"max-rel {self.max_rel:.3g}, rms {self.rms:.3g}{self.shown}"


def compare(
    out: torch.Tensor, reference: torch.Tensor, dtype: str, limits: tuple[float, float] | None = None
) -> Verdict:
    """Hold `out` against the float32 `reference` of the same shape under the limits of `dtype` (or others)."""
    got = out.float()
    error = (got - reference).abs()
    # One transfer: each would wait for the device.
    facts = [(~torch.isfinite(got)).sum(), error.max(), error.square().mean(), reference.abs().max()]
    numbers = torch.stack([fact.float() for fact in (*facts, reference.square().mean())]).tolist()
    unwritten, largest, squares, top, scale = numbers
    if unwritten:
        return Verdict(False, float("inf"), float("inf"), int(unwritten))
    max_rel = largest / max(top, 1e-30)
    rms = float(squares**0.5) / max(float(scale**0.5), 1e-30)
    limit_max, limit_rms = limits or LIMITS[dtype]
    ok = max_rel <= limit_max and rms <= limit_rms
    return Verdict(ok, max_rel, rms, 0, f" over {limit_max:g} and {limit_rms:g}")


class Batch(Protocol):
    """The inputs of one batch size, with everything prepared that is not part of the timed kernel."""

    size: int
    routes: int

    def launch(self, projection: Projection, config: Mapping[str, Any], route: int) -> Any:
        """Run one projection as it is served and return its output, whatever form that has."""

    def check(self, projection: Projection, config: Mapping[str, Any], out: Any) -> Verdict:
        """Compare an output of `launch(.., route=0)` with the float32 reference."""

    def whole(self, configs: Mapping[Projection, Mapping[str, Any]], route: int) -> torch.Tensor:
        """Run the whole op as it is served."""

    def check_whole(self, out: torch.Tensor) -> Verdict:
        """Compare an output of `whole(.., route=0)` with the float32 reference."""


class Adapter(Protocol):
    """One engine's kernel for one problem."""

    engine: str
    problem: Problem
    descriptors: frozenset[str]
    """Device features with which this kernel is usually faster through descriptor loads."""

    def kernel_hash(self) -> str:
        """sha256 over the sources of the kernel that is timed."""

    def kernel_files(self) -> Mapping[str, str]:
        """Those sources by name, each with its sha256; empty where the hash alone is kept."""

    def setup(self, device: torch.device, seed: int, copies: int) -> int:
        """Make the weights, `copies` sets of them to rotate through a cold cache; returns bytes per set."""

    def batch(self, size: int, routes: Routes) -> Batch:
        """Prepare the inputs of one batch size."""

    def kernels_of(self, projection: Projection) -> tuple[str, ...]:
        """Names of the kernels of which every launch of a projection runs one: its compiled facts count."""

    def default(self, size: int) -> Mapping[str, Any] | None:
        """The config that the launcher takes by itself; None where `moegate.configs` says what runs without a file."""

    def helpers(self, block: int) -> Sequence[Callable[[], object]]:
        """Launches of what runs around the tuned kernels at one BLOCK_SIZE_M (0: whatever needs none).

        Called in a compile-only child, so that the measuring child finds these kernels compiled.
        """

    def simulate(self, target: Mapping[str, Any]) -> None:
        """In a compile-only child: make the launcher believe in the device of `target` (see `Session.do_hello`)."""


class AdapterBase:
    """What most adapters have in common: no default of their own, and nothing around the tuned kernel."""

    descriptors: frozenset[str] = frozenset()

    def kernel_files(self) -> Mapping[str, str]:
        """Nothing: the hash says it all."""
        return {}

    def default(self, size: int) -> Mapping[str, Any] | None:
        """None: `moegate.configs` knows."""
        del size
        return None

    def helpers(self, block: int) -> Sequence[Callable[[], object]]:
        """Nothing."""
        del block
        return []
