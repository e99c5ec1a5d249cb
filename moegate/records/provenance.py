"""Where a tuned config file comes from: the sidecar `<config file>.provenance.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["SUFFIX", "ConfigTiming", "Provenance", "config_name", "sidecar_name"]

SUFFIX = ".provenance.json"


def sidecar_name(config: str) -> str:
    """Return the sidecar's file name for a config file's name (`E=..json` -> `E=...provenance.json`)."""
    return config.removesuffix(".json") + SUFFIX


def config_name(name: str) -> str:
    """The config file that a name stands for: itself, or the one whose sidecar it is."""
    return name.removesuffix(SUFFIX) + ".json" if name.endswith(SUFFIX) else name


@dataclass(frozen=True)
class ConfigTiming:
    """Winner against default at one batch size, in microseconds; spread is the median absolute deviation."""

    winner_us: float
    default_us: float
    winner_spread_us: float = 0.0
    default_spread_us: float = 0.0
    verified: bool = False
    kept_default: bool = False


@dataclass(frozen=True)
class Provenance:
    """What is known of a config file.

    `origin` is `measured` (by our tuner, on `device`) or `imported` (from `source`, not measured here). `covered` of
    `candidates` configs of the space were evaluated. `environment` holds versions and the code-generation variables.
    `kernel_hash` is over the sources of the kernel that was timed; for our own, `kernel_files` names them (file ->
    sha256). Sidecars written before there was `kernel_files` hold a hash over all our kernels instead.
    """

    origin: Literal["measured", "imported"]
    engine: str
    date: str
    source: str = ""
    kernel_hash: str = ""
    kernel_files: dict[str, str] = field(default_factory=dict)
    device: str = ""
    identity: str = ""
    triton: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    candidates: int = 0
    covered: int = 0
    timings: dict[str, ConfigTiming] = field(default_factory=dict)
    verified: bool = False
    interpreter: bool = False
    command: str = ""
    config_sha256: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    schema: int = 1

    @property
    def op(self) -> str:
        """The op whose kernel was timed: the experts', where nothing else is said."""
        problem = self.detail.get("problem")
        op = problem.get("op") if isinstance(problem, dict) else None
        return op if isinstance(op, str) else "fused_experts"
