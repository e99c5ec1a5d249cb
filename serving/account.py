"""What a running server says about itself, in one form for every engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from moegate.records import DeviceIdentity, Proof

__all__ = ["Account"]


@dataclass(frozen=True)
class Account:
    """A server's own account, asked for after the load.

    `environment` holds versions and code-generation variables; `batch_sizes` counts the batch sizes it saw (text
    keys); `peak_memory_bytes` is None where the engine does not tell. `interpreter` marks Triton's interpreter.
    """

    device: DeviceIdentity
    proof: Proof
    environment: dict[str, str] = field(default_factory=dict)
    batch_sizes: dict[str, int] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    interpreter: bool = False
