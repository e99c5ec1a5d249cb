"""The versioned files that stages hand to each other, as frozen dataclasses.

Every record is read by `from_json`, which refuses unknown fields and unknown schema numbers.
"""

from __future__ import annotations

from moegate.records.card import RunCard
from moegate.records.codec import from_json, read, to_json, write
from moegate.records.comparison import (
    CellVerdict,
    Comparison,
    Divergence,
    Effect,
    GateReason,
    GateResult,
    Interaction,
)
from moegate.records.measurement import Case, ConfigUse, DeviceIdentity, Launch, Measurement, Proof, Samples
from moegate.records.plan import (
    ArmSpec,
    ComparePolicy,
    GatePolicy,
    ImageSpec,
    ModelSpec,
    Plan,
    PlannedCell,
    PoolSpec,
    QuarantineRule,
)
from moegate.records.provenance import ConfigTiming, Provenance
from moegate.records.run import FINAL_STATES, Attempt, CellOutcome, RunBundle, ShellLine, State, TrendPoint

__all__ = [
    "FINAL_STATES",
    "ArmSpec",
    "Attempt",
    "Case",
    "CellOutcome",
    "CellVerdict",
    "ComparePolicy",
    "Comparison",
    "ConfigTiming",
    "ConfigUse",
    "DeviceIdentity",
    "Divergence",
    "Effect",
    "GatePolicy",
    "GateReason",
    "GateResult",
    "ImageSpec",
    "Interaction",
    "Launch",
    "Measurement",
    "ModelSpec",
    "Plan",
    "PlannedCell",
    "PoolSpec",
    "Proof",
    "Provenance",
    "QuarantineRule",
    "RunBundle",
    "RunCard",
    "Samples",
    "ShellLine",
    "State",
    "TrendPoint",
    "from_json",
    "read",
    "to_json",
    "write",
]
