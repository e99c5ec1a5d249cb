"""Did a launch get what its arm asked for? A number measured on something else is no number."""

from __future__ import annotations

from pathlib import Path

from moegate import canonical
from moegate.errors import UsageError
from moegate.records import Measurement, Proof, Provenance, read
from moegate.records.provenance import SUFFIX
from orchestrator.cells.base import Work

__all__ = ["wrong_kernels", "wrong_proof"]


def wrong_proof(work: Work, measurement: Measurement) -> str | None:
    """Return how a launch's proof contradicts its cell and arm, or None where it holds."""
    for launch in measurement.launches:
        if launch.proof is None:
            return "the launch does not say which backend and configs it used"
        reason = _wrong_backend(work, launch.proof) or _wrong_configs(work, launch.proof)
        if reason:
            return reason
    return None if measurement.launches else "the result holds no launch"


def wrong_kernels(sha: str, kernel_hash: str, measurement: Measurement) -> str | None:
    """Return how a launch of an arm with a `source` shows that it ran other kernels than the commit's, or None.

    kernel_hash: of the commit's own kernels; another engine's are not the commit's, and are not asked.
    """
    for launch in measurement.launches:
        proof = launch.proof
        if proof is not None and proof.engine == "moegate" and proof.kernel_hash not in ("", kernel_hash):
            return f"asked for the code of {sha[:12]}, the launch ran kernels {proof.kernel_hash[:12]}"
    return None


def _wrong_backend(work: Work, proof: Proof) -> str | None:
    engine, wanted = work.cell.axes.get("engine"), work.cell.axes.get("moe_runner_backend")
    if proof.engine != engine:
        return f"asked for engine {engine}, got {proof.engine}"
    if proof.requested_backend != wanted:
        return f"asked for backend {wanted}, the launch was told {proof.requested_backend}"
    if wanted != "auto" and proof.resolved_backend != wanted:
        return f"asked for backend {wanted}, got {proof.resolved_backend}"
    others = {name: count for name, count in proof.calls.items() if count and name != proof.resolved_backend}
    if others:
        return f"resolved to {proof.resolved_backend}, yet calls went to {', '.join(sorted(others))}"
    if proof.calls and not proof.calls.get(proof.resolved_backend):
        return f"no call reached {proof.resolved_backend}"
    return None


def _wrong_configs(work: Work, proof: Proof) -> str | None:
    name = work.arm.name if work.arm else "?"
    tuned = [use for use in proof.configs if use.reason != "default"]
    if work.configs is None:
        if tuned:
            return f"arm {name} asked for no configs, yet {tuned[0].file} was used"
        return None
    trees = {canonical.tree_digest(path) for path in (work.configs, work.configs / "configs")}
    if proof.configs_digest not in trees:
        return f"arm {name} asked for the configs in {work.configs.name}, the launch read another tree"
    if work.arm and work.arm.configs == "tuned" and proof.configs and not tuned:
        return f"arm {name} asked for tuned configs, yet every lookup fell back to the default"
    return _other_kernel(work.configs, proof) if work.arm and work.arm.configs == "tuned" else None


def _other_kernel(tuned: Path, proof: Proof) -> str | None:
    """How what this run tuned was timed on another kernel than the launch ran; what neither says is not asked."""
    for path in sorted(tuned.rglob(f"*{SUFFIX}")):
        try:
            record = read(Provenance, path)
        except UsageError as error:
            return f"{path.name}: {error.message}"
        ran = proof.kernels.get(record.op)
        if ran and record.engine == proof.engine and record.kernel_hash not in ("", ran):
            return f"{path.name} was tuned on kernel {record.kernel_hash[:12]}, the launch ran {ran[:12]}"
    return None
