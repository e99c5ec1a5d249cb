"""What `orchestrator explain` answers: the key, both lookups with everything searched, and whether they are reached."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from moegate import devices
from moegate.configs import ConfigKey, ConfigTree, Pair, Resolution, format_name, parse_version
from moegate.configs.engines import EngineRaises, engine_of, resolve
from moegate.configs.names import Projection
from moegate.configs.values import Engine
from moegate.dispatch.reach import ensure_request, reachability
from moegate.errors import UsageError
from moegate.families import Layout, load_layout
from moegate.paths import config_root
from orchestrator.check.trees import moe_folder


@dataclass(frozen=True)
class Question:
    """One question; None where this machine or the model answers."""

    model: Path
    device: str | None
    triton: str | None
    engine: str
    configs: str | None
    tp: int
    ep: int
    dtype: str | None
    batch_sizes: tuple[int, ...]
    backend: str
    fuse_shared: bool = True


def answer(question: Question) -> dict[str, Any]:
    """The document that `explain --json` prints.

    Raises:
        UsageError: unknown engine or backend, a bad model config, sizes that do not divide, no device or Triton to ask
            about, or a device that is none.
    """
    engine = engine_of(question.engine)
    ensure_request(engine.name, question.backend)
    layout = load_layout(question.model)
    here = installed()
    device = question.device or here["device"]
    triton = question.triton or here["triton"]
    if device is None:
        raise UsageError(
            "no device is named and none is found here", field="--device", fix="name one, such as NVIDIA_H200"
        )
    if triton is None:
        raise UsageError("no Triton is named and none is installed", field="--triton", fix="name one, such as 3.8.0")
    parse_version(triton)
    root = _root(question.configs, engine.name)
    if question.device is not None:  # what the driver here reports is a device, known or not
        devices.ensure_asked(question.device, "--device", ConfigTree(root).device_names())
    key = layout.key(
        device,
        tp=question.tp,
        ep=question.ep,
        dtype=question.dtype,
        fuse_shared=question.fuse_shared,
        engine=engine.name,
    )
    projections, resolved = {}, {}
    for projection in ("up", "down"):
        projections[projection], resolved[projection] = _projection(engine.name, root, key, projection, triton)
    _fill_configs(projections, resolved, question.batch_sizes, layout)
    reach = reachability(engine.name, layout, key, question.backend)
    return {
        "key": asdict(key),
        "projections": projections,
        "reachable": reach.reachable,
        "why": reach.why,
        "chain": [{"backend": s.backend, "chosen": s.chosen, "why": s.why} for s in reach.chain],
        "engine": engine.name,
        "engine_version": engine.version,
        "triton": triton,
        "configs": None if root is None else str(root),
        "model": _model(layout),
        "notes": _notes(question, layout, key, here),
    }


def _root(text: str | None, engine: Engine) -> Path | None:
    if text == "none":
        return None
    if text is None:
        return config_root()
    return moe_folder(Path(text), engine)


def _projection(
    engine: Engine, root: Path | None, key: ConfigKey, projection: Projection, triton: str
) -> tuple[dict[str, Any], Resolution | None]:
    spelling = engine_of(engine).spelling
    row: dict[str, Any] = {
        "file_name": format_name(key, projection, spelling),
        "searched": [],
        "resolved": None,
        "reason": "default",
        "alias": None,
        "candidates": [],
        "configs": {},
    }
    try:
        found = resolve(engine, root, key, projection, triton=triton)
    except EngineRaises as error:
        return {**row, "reason": "error", "error": str(error)}, None
    row.update(searched=list(found.searched), resolved=found.file, reason=found.reason, alias=found.alias)
    if found.reason != "exact":
        near = ConfigTree(root).candidates(key, projection)
        row["candidates"] = [{"file": item.file, "why": item.why} for item in near if item.file != found.file]
    return row, found


def _fill_configs(
    rows: dict[str, dict[str, Any]], found: dict[str, Resolution | None], sizes: tuple[int, ...], layout: Layout
) -> None:
    """The parameters of every batch size, as both projections run together."""
    up, down = found["up"], found["down"]
    if up is None or down is None:
        return
    pair = Pair(up, down)
    for size in sizes:
        try:
            rows["up"]["configs"][str(size)], rows["down"]["configs"][str(size)] = pair.for_batch(size, layout.topk)
        except (KeyError, TypeError, ValueError) as error:
            rows["up"]["error"] = f"batch size {size}: the file's values cannot be used: {type(error).__name__}"
            return


def _model(layout: Layout) -> dict[str, Any]:
    return {
        "architecture": layout.architecture,
        "experts": layout.experts,
        "topk": layout.topk,
        "intermediate": layout.intermediate,
        "hidden": layout.hidden,
        "layers": layout.layers,
        "dense_layers": layout.dense_layers,
        "moe_layers": len(layout.moe_layers),
        "shared_experts": layout.shared_experts,
        "dtype": layout.dtype,
        "quant": layout.quant.dtype,
        "read_from": layout.nested or "top level",
    }


def _notes(question: Question, layout: Layout, key: ConfigKey, here: dict[str, str | None]) -> list[str]:
    notes = list(layout.conflicts)
    if (unknown := devices.unknown(key.device_name)) is not None:
        notes.append(unknown)
    for what, asked in (("triton", question.triton), ("device", question.device)):
        found = here[what]
        if asked and found and devices.normalise(asked) != devices.normalise(found):
            notes.append(f"this machine has {what} {found}, the question is about {asked}")
    if layout.fused_shared and question.engine != "vllm":
        notes.append(
            f"E counts {layout.fused_shared} shared expert beside {layout.experts} routed ones"
            if question.fuse_shared
            else "shared-expert fusion is off: E counts the routed experts only"
        )
    return notes


def installed() -> dict[str, str | None]:
    """The Triton and the device that are really here, without importing anything heavy; None where there is none."""
    triton = next((found for name in ("triton", "pytorch-triton-xpu", "triton-xpu") if (found := _version(name))), None)
    return {"triton": triton, "device": _device_here()}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_here() -> str | None:
    """The first accelerator's name; `cpu` only where Triton's interpreter is on."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("Model:"):
                return line.split(":", 1)[1].strip()
    for path in sorted(Path("/sys/class/drm").glob("card*/device/product_name")):
        return path.read_text(errors="replace").strip() or None
    return None


def as_text(document: dict[str, Any]) -> str:
    """The answer for people."""
    key = document["key"]
    lines = [
        f"{document['model']['architecture']}: E={key['E']} N={key['N']}"
        f" dtype {key['dtype'] or document['model']['dtype']} on {key['device_name']},"
        f" Triton {document['triton']}, {document['engine']} {document['engine_version']}",
    ]
    lines += [f"note: {note}" for note in document["notes"]]  # what the question is about, before a long table
    for name, row in document["projections"].items():
        through = "" if row["reason"] == "alias" else " through alias"
        alias = f"{through} {row['alias']}" if row["alias"] else ""
        lines.append(f"{name}: {row['reason']}{alias}: {row['resolved'] or row.get('error') or 'no file answers'}")
        lines += [f"    searched {file}" for file in row["searched"]]
        lines += [f"    near     {item['file']}: {item['why']}" for item in row["candidates"]]
        for size, config in row["configs"].items():
            lines.append(f"    M={size:<5} " + " ".join(f"{k}={v}" for k, v in config.items()))
    lines.append(f"reachable: {'yes' if document['reachable'] else 'no'}: {document['why']}")
    return "\n".join(lines)
