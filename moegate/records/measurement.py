"""What a cell's child measured: one format for every kind of cell (`result.json`, and each launch's own file)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Case", "ConfigUse", "DeviceIdentity", "Launch", "Measurement", "Proof", "Samples"]

DeviceKind = Literal["cpu", "cuda", "rocm", "xpu"]


@dataclass(frozen=True)
class DeviceIdentity:
    """One physical device.

    `identity` is its UUID or PCI address; for a CPU it is `cpu:` and the machine's boot-independent name. Two launches
    are comparable only where the identities are equal.
    """

    kind: DeviceKind
    name: str
    identity: str
    arch: str = ""
    driver: str = ""
    memory_bytes: int = 0


@dataclass(frozen=True)
class ConfigUse:
    """Which tuned configuration one projection really ran with at one batch size, and why.

    An op of one kernel has the projection `main`.
    """

    op: str
    projection: Literal["up", "down", "main"]
    batch_size: int
    file: str | None
    reason: str
    config: dict[str, Any]
    alias: str | None = None
    calls: int = 0


@dataclass(frozen=True)
class Proof:
    """Evidence that a launch got what its arm asked for.

    `calls` counts operator calls per backend. `configs_digest` is `canonical.tree_digest` of the tree that was read,
    so that the arms of a pair can be told apart by content. `functions` names what ran per operator: the function of
    our engine, the backend of one that does not tell more. `kernel_hash` is over all kernels of the engine: which code
    ran. `kernels` holds, per op with tuned configs, the hash that provenance has of the op's own kernel.
    """

    engine: str
    requested_backend: str
    resolved_backend: str
    chain: tuple[dict[str, Any], ...] = ()
    configs_root: str | None = None
    configs_digest: str = ""
    configs: tuple[ConfigUse, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)
    kernel_hash: str = ""
    functions: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Samples:
    """The values of one metric in one launch. The gate uses their median; the primary metric alone decides."""

    metric: str
    unit: str
    better: Literal["lower", "higher"]
    values: tuple[float, ...]
    primary: bool = False


@dataclass(frozen=True)
class Launch:
    """One fresh process (kernels) or server (serving): the unit of replication.

    `arm`, `pair`, `order` and `stage` are filled in by the scheduler; a child leaves them empty. `void_reason` says
    why a launch must not be paired. `batch_sizes` counts the batch sizes that a server saw (text keys, JSON).
    """

    device: DeviceIdentity
    started: str
    wall_s: float
    samples: tuple[Samples, ...] = ()
    proof: Proof | None = None
    peak_memory_bytes: int | None = None
    batch_sizes: dict[str, int] = field(default_factory=dict)
    arm: str | None = None
    pair: int | None = None
    order: int | None = None
    stage: Literal["screen", "confirm"] | None = None
    void_reason: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    def primary(self) -> Samples | None:
        """Return the samples of the primary metric, or None."""
        return next((samples for samples in self.samples if samples.primary), None)


@dataclass(frozen=True)
class Case:
    """One check inside a cell, such as one operator at one shape and dtype."""

    name: str
    status: Literal["passed", "failed", "skipped"]
    message: str = ""
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """The result of a child or of a cell's attempt.

    `work` counts what was done (`requests`, `evaluations`, `cases`, `files`); a result whose counts are all zero is no
    result. `outputs` maps files that the child promises, relative to the result's folder, to their sha256.
    `interpreter` marks timings of Triton's interpreter: real, but no claim about hardware.
    """

    kind: str
    status: Literal["ok", "failed"]
    device: DeviceIdentity
    environment: dict[str, str]
    work: dict[str, int]
    launches: tuple[Launch, ...] = ()
    cases: tuple[Case, ...] = ()
    outputs: dict[str, str] = field(default_factory=dict)
    interpreter: bool = False
    failure: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    schema: int = 1
