"""From finals to files: SGLang's JSON (vLLM's on request), provenance beside it, and a look-up of what was written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moegate import canonical
from moegate.configs import (
    ConfigKey,
    ConfigTree,
    DenseKey,
    directory_name,
    format_dense_name,
    format_name,
    load_config,
)
from moegate.configs.names import Spelling
from moegate.configs.values import refused_by
from moegate.errors import InfraError
from moegate.paths import write_atomic
from moegate.records import ConfigTiming, Provenance, write
from moegate.records.provenance import sidecar_name
from tuner.config import Config, Scalar
from tuner.finals import Final
from tuner.places import CONFIGS, DENSE, VLLM, ensure_place
from tuner.problem import Problem, Projection

__all__ = [
    "ENGINE_FIELDS",
    "Origin",
    "emit",
    "emit_all",
    "ensure_places",
    "file_entry",
    "files_of",
    "single_name",
    "write_file",
]

_PROJECTIONS: Mapping[Spelling, tuple[Projection, ...]] = {"sglang": ("up", "down"), "vllm": ("up",)}

# What each engine's loader keeps of a config; anything else would silently not be what was timed.
ENGINE_FIELDS: dict[str, frozenset[str] | None] = {
    "moegate": None,
    "sglang": frozenset(
        {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages", "waves_per_eu",
         "USE_TMA"}
    ),
    "vllm": frozenset(
        {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages", "waves_per_eu",
         "matrix_instr_nonkdim", "kpack"}
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Origin:
    """Where the timings come from; becomes the provenance of every file."""

    engine: str
    kernel_hash: str
    device: str
    identity: str
    triton: str
    environment: dict[str, str]
    candidates: int
    covered: int
    interpreter: bool
    command: str
    detail: dict[str, Any] = field(default_factory=dict)
    kernel_files: dict[str, str] = field(default_factory=dict)


def file_entry(config: Config, engine: str) -> tuple[dict[str, Scalar], list[str]]:
    """One entry of a file for `engine`, and the names of fields that its loader would drop."""
    keep = ENGINE_FIELDS.get(engine)
    entry = {name: value for name, value in config.items if keep is None or name in keep}
    return entry, [name for name, _ in config.items if name not in entry]


def write_file(path: Path, entries: Mapping[int, Mapping[str, Scalar]]) -> None:
    """Write one config file as the engines' tuners do: four spaces, batch sizes ascending, a newline at the end."""
    ordered = {str(size): dict(entries[size]) for size in sorted(entries)}
    write_atomic(path, json.dumps(ordered, indent=4) + "\n")


def files_of(root: Path, problem: Problem, triton: str, device_name: str, *, vllm: bool = False) -> list[Path]:
    """Every file that a tuning may write below `root` for people and engines: configs, and then what tells of each."""
    if problem.op == "fused_experts":
        key = problem.key(device_name)
        spellings: list[Spelling] = ["sglang", "vllm"] if vllm else ["sglang"]
        configs = [_file(root, key, p, s, triton) for s in spellings for p in _PROJECTIONS[s]]
    else:
        configs = [root / DENSE / single_name(problem, device_name)]
    return [*configs, *(path.with_name(sidecar_name(path.name)) for path in configs)]


def ensure_places(root: Path, problem: Problem, *, triton: str = "", device_name: str = "", vllm: bool = False) -> None:
    """Refuse what takes no files, before anything is measured for them.

    Without `triton` and `device_name`, which a child has to be asked for, whatever has the name of a JSON file in the
    folders of this problem counts.

    Raises:
        UsageError: naming the folder, or what has the name of a file and is none.
    """
    if triton and device_name:
        for path in files_of(root, problem, triton, device_name, vllm=vllm):
            ensure_place(path)
        return
    for folder in {path.parent for path in files_of(root, problem, "", "any", vllm=vllm)}:
        ensure_place(folder / "name.json")
        for there in folder.rglob("*.json"):
            if not there.is_file():
                ensure_place(there)


def _folder(root: Path, spelling: Spelling, triton: str) -> Path:
    """Where the files of a MoE layer go."""
    if spelling == "vllm":
        return root / VLLM
    return root / CONFIGS / directory_name(triton) if triton else root / CONFIGS


def _file(root: Path, key: ConfigKey, projection: Projection, spelling: Spelling, triton: str) -> Path:
    return _folder(root, spelling, triton) / format_name(key, "down" if projection == "down" else "up", spelling)


def emit_all(
    root: Path, problem: Problem, finals: Sequence[Final], origin: Origin, *, vllm: bool = False
) -> list[Path]:
    """All files of a tuning: `fused_experts` as `emit` says (with `vllm` in vLLM's spelling too), other ops one file.

    Raises:
        InfraError: what is read back differs.
    """
    if problem.op == "fused_experts":
        key = problem.key(origin.device)
        return emit(root, key, finals, origin) + (emit(root, key, finals, origin, "vllm") if vllm else [])
    path = root / DENSE / single_name(problem, origin.device)
    entries = {final.batch_size: file_entry(final.configs["main"], "moegate")[0] for final in finals}
    write_file(path, entries)
    sidecar = path.with_name(sidecar_name(path.name))
    write(sidecar, _provenance(finals, origin, path, []))
    read_back = {int(size): entry for size, entry in canonical.load_json(path).items()}
    if problem.op == "block_fp8_linear":
        read_back = dict(load_config(path))
    if read_back != entries:
        raise InfraError(f"{path}: what is read back is not what was tuned")
    return [path, sidecar]


def single_name(problem: Problem, device_name: str) -> str:
    """The file name of an op of one kernel.

    SGLang's for `block_fp8_linear`. No engine has files for `store_kv_cache`: the name says the op and its shape.
    """
    if problem.op == "block_fp8_linear":
        return format_dense_name(DenseKey(problem.N, problem.H, device_name, problem.dtype, problem.block_shape))
    return f"{problem.op},heads={problem.N},dim={problem.H},device_name={device_name},dtype={problem.dtype}.json"


def emit(root: Path, key: ConfigKey, finals: Sequence[Final], origin: Origin,
         spelling: Spelling = "sglang") -> list[Path]:  # fmt: skip
    """Write the config files of a tuning below `root` and read them back through the look-up.

    SGLang's spelling writes `configs/triton_X_Y_Z/` with an up and a down file; vLLM's writes the up file alone, flat,
    and without the batch sizes where something won that its kernel does not take.

    Returns:
        All files written, config files first.

    Raises:
        InfraError: the look-up does not answer with what was written.
    """
    folder, projections = _folder(root, spelling, origin.triton), _PROJECTIONS[spelling]
    if spelling == "vllm":
        finals = [final for final in finals if not refused_by("vllm", final.configs["up"].as_dict())]
        if not finals:
            return []
    configs, sidecars = [], []
    for projection in projections:
        entries: dict[int, dict[str, Scalar]] = {}
        dropped: set[str] = set()
        for final in finals:
            entries[final.batch_size], lost = file_entry(
                final.configs[projection], spelling if spelling == "vllm" else origin.engine
            )
            dropped.update(lost)
        path = _file(root, key, projection, spelling, origin.triton)
        write_file(path, entries)
        sidecar = path.with_name(sidecar_name(path.name))
        write(sidecar, _provenance(finals, origin, path, sorted(dropped)))
        configs.append(path)
        sidecars.append(sidecar)
    _reload(folder if spelling == "vllm" else root, key, finals, origin, projections, spelling)
    return [*configs, *sidecars]


def _provenance(finals: Sequence[Final], origin: Origin, path: Path, dropped: list[str]) -> Provenance:
    timings = {
        str(f.batch_size): ConfigTiming(
            f.winner_us, f.default_us, f.winner_spread_us, f.default_spread_us, f.verified, f.kept_default
        )
        for f in finals
    }
    notes = [f"{name} was stripped: {origin.engine}'s loader drops it" for name in dropped]
    notes += [note for f in finals for note in f.notes]
    return Provenance(
        origin="measured", engine=origin.engine, date=datetime.now(UTC).isoformat(timespec="seconds"),
        kernel_hash=origin.kernel_hash, kernel_files=origin.kernel_files, device=origin.device,
        identity=origin.identity, triton=origin.triton, environment=origin.environment,
        candidates=origin.candidates, covered=origin.covered, timings=timings,
        verified=all(f.verified for f in finals), interpreter=origin.interpreter, command=origin.command,
        config_sha256=canonical.file_digest(path), detail={**origin.detail, "notes": notes},
    )  # fmt: skip


def _reload(root: Path, key: ConfigKey, finals: Sequence[Final], origin: Origin, projections: Sequence[Projection],
            spelling: str) -> None:  # fmt: skip
    tree = ConfigTree(root)
    for projection in projections:
        found = tree.resolve(key, "down" if projection == "down" else "up", triton=origin.triton)
        for final in finals:
            wanted, _ = file_entry(final.configs[projection], spelling if spelling == "vllm" else origin.engine)
            if found.reason != "exact" or found.for_batch(final.batch_size) != wanted:
                raise InfraError(f"{found.file}: the look-up answers {found.reason} for batch size {final.batch_size}")
