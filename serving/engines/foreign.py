"""What engines of other projects have in common: a model folder they can load, a probe, and proof from log lines."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegate import canonical
from moegate.configs import nearest, parse_name
from moegate.configs.names import ConfigKey
from moegate.devices import physical_identity
from moegate.errors import InfraError, MoegateError
from moegate.records import ConfigUse, DeviceIdentity
from serving.engines.protocol import Spec

__all__ = ["Lookup", "Probe", "config_uses", "empty_tree", "model_dir", "probe", "tree_digest"]

_PROBE_S = 120.0

# Runs in the engine's own environment, so it may import nothing of ours.
_PROBE = """
import hashlib, importlib.metadata as m, importlib.util as u, json, pathlib, sys
import torch
out = {"versions": {"python": sys.version.split()[0]}, "kernel_hash": ""}
for name in sys.argv[1].split(","):
    try: out["versions"][name] = m.version(name)
    except m.PackageNotFoundError: pass
try:
    import triton; out["versions"]["triton"] = triton.__version__
except ImportError: pass
spec = u.find_spec(sys.argv[1].split(",")[0])
files = [pathlib.Path(spec.origin).parent / part for part in sys.argv[2].split(",")] if spec and spec.origin else []
files = [f for f in files if f.is_file()]
if files: out["kernel_hash"] = hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]
kind, mod = "cpu", None
if torch.cuda.is_available(): kind, mod = ("rocm" if torch.version.hip else "cuda"), torch.cuda
elif hasattr(torch, "xpu") and torch.xpu.is_available(): kind, mod = "xpu", torch.xpu
if mod:
    p = mod.get_device_properties(0)
    out["device"] = {"kind": kind, "name": p.name, "memory_bytes": int(p.total_memory)}
    out["uuid"] = str(p.uuid) if getattr(p, "uuid", None) is not None else None
    out["pci"] = None
    if hasattr(p, "pci_bus_id"): out["pci"] = "%x:%x:%x.0" % (p.pci_domain_id, p.pci_bus_id, p.pci_device_id)
    cap = getattr(mod, "get_device_capability", None)
    if kind == "cuda": out["device"]["arch"] = "sm_%d%d" % cap(0)
    if kind == "rocm": out["device"]["arch"] = p.gcnArchName.split(":")[0]
else:
    import os, platform
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    name = next((l.split(":", 1)[1].strip() for l in lines if l.startswith("model name")), platform.machine())
    out["device"] = {"kind": "cpu", "name": name, "identity": "cpu:" + platform.node(), "arch": "cpu",
                     "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
print(json.dumps(out))
"""


@dataclass(frozen=True)
class Probe:
    """What the engine's environment is: device, versions, and a hash of the kernel's and the lookup's source."""

    device: DeviceIdentity
    versions: dict[str, str]
    kernel_hash: str


def probe(python: str, packages: Sequence[str], sources: Sequence[str], env: Mapping[str, str]) -> Probe:
    """Run the probe with the engine's interpreter. `sources` are files relative to the first package's folder."""
    argv = [python, "-P", "-c", _PROBE, ",".join(packages), ",".join(sources)]
    try:
        done = subprocess.run(argv, env=dict(env), capture_output=True, timeout=_PROBE_S, check=False, text=True)
        out = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise InfraError(f"the probe of {packages[0]} failed: {error}") from None
    if out is None:
        raise InfraError(f"the probe of {packages[0]} failed: {done.stderr.strip()[-300:]}")
    device = out["device"]
    if "identity" not in device:
        device["identity"] = physical_identity(device["kind"], out["uuid"], out["pci"]) or f"{device['kind']}:0"
    return Probe(DeviceIdentity(**device), out["versions"], out["kernel_hash"])


def python() -> str:
    """The interpreter that starts engines: the one that runs us, so that an image holds engine and client alike."""
    return sys.executable


def model_dir(spec: Spec, work: Path) -> Path:
    """A folder the engine can load: the checkpoint's own, or one made of config.json and a word-per-token tokenizer.

    Random weights have no tokenizer, yet the engines insist on one; ours never matters, because prompts are token ids
    and tokens are counted by the server.
    """
    if spec.weights != "random":
        return Path(spec.weights)
    target = work / "model"
    target.mkdir(parents=True, exist_ok=True)
    config = canonical.load_json(spec.model_folder / "config.json")
    shutil.copy(spec.model_folder / "config.json", target / "config.json")
    sections = [config.get(name) for name in ("text_config", "language_config")] + [config]
    vocab = next(int(part["vocab_size"]) for part in sections if isinstance(part, dict) and part.get("vocab_size"))
    (target / "tokenizer.json").write_text(json.dumps(_tokenizer(vocab)), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t1", "pad_token": "t0"}
    (target / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return target


def _tokenizer(vocab: int) -> dict[str, Any]:
    words = {f"t{index}": index for index in range(vocab)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }


def empty_tree(work: Path) -> Path:
    """A folder with an empty `configs/`: the untuned arm of a lookup that insists on the folder being there."""
    root = work / "untuned"
    (root / "configs").mkdir(parents=True, exist_ok=True)
    return root


def config_folder(root: Path | None) -> Path | None:
    """The folder that holds the Triton directories (or the flat files) of a config tree."""
    if root is None:
        return None
    return root / "configs" if (root / "configs").is_dir() else root


def tree_digest(root: Path | None) -> str:
    """The digest of a config tree as proofs carry it."""
    folder = config_folder(root)
    return canonical.digest([]) if folder is None else canonical.tree_digest(folder)


@dataclass(frozen=True)
class Lookup:
    """One lookup that a log tells of: the file that answered (None: the default) and moegate's word for why."""

    projection: str
    file: Path | None
    reason: str


def config_uses(op: str, lookups: Iterable[Lookup], sizes: Iterable[int], calls: Mapping[int, int]) -> list[ConfigUse]:
    """What each lookup gave at each batch size that was seen (nearest batch size, first key on a tie)."""
    uses: list[ConfigUse] = []
    for lookup in lookups:
        configs: Mapping[int, Mapping[str, Any]] = {}
        if lookup.file is not None:
            configs = _load(lookup.file)
        for m in sizes:
            config = dict(configs[nearest(configs, m)]) if configs else {}
            projection: Any = lookup.projection
            uses.append(ConfigUse(op, projection, m, None if lookup.file is None else _relative(lookup.file),
                                  lookup.reason, config, None, calls.get(m, 0)))  # fmt: skip
    return uses


def _load(file: Path) -> Mapping[int, Mapping[str, Any]]:
    try:
        sizes = {canonical.whole(key, 1, 1 << 30): value for key, value in canonical.load_json(file).items()}
        return {size: value for size, value in sizes.items() if size is not None}
    except (MoegateError, AttributeError) as error:
        raise InfraError(f"the server read {file}, which cannot be read now: {error}") from None


def _relative(file: Path) -> str:
    """The file as moegate's lookup names it: below its Triton directory, or by its name alone."""
    return f"{file.parent.name}/{file.name}" if file.parent.name.startswith("triton_") else file.name


def projection_of(file: str) -> str:
    """`up` or `down`, from a config file's name."""
    parsed = parse_name(Path(file).name)
    return parsed.projection if parsed and isinstance(parsed.key, ConfigKey) else "up"


def count_matches(pattern: re.Pattern[str], text: str) -> Counter[int]:
    """How often each number of a pattern's first group appears."""
    return Counter(int(match[1]) for match in pattern.finditer(text))
