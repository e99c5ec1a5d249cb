"""vLLM (`vllm serve`), as released: flags of 0.32.

Its lookup reads the flat folder `$VLLM_TUNED_CONFIG_FOLDER` first and then the files it ships, so the untuned arm is an
empty folder and a shape that vLLM ships no file for; where a shipped file answers, the log says so and the proof shows
it. It has no Triton directories and no down projection: of a tree, the up configs of the best-matching Triton
directory are handed over.
"""

from __future__ import annotations

import os
import re
import shutil
from importlib import metadata
from pathlib import Path

from moegate.configs import ConfigKey, ConfigTree, format_name, parse_name
from moegate.configs.versions import search_order
from moegate.records import Proof
from serving import apikey
from serving.account import Account
from serving.engines import foreign
from serving.engines.protocol import HOST, Command, Launched, Spec

__all__ = ["VllmEngine", "lookups"]

OP = "fused_experts"
SOURCES = ("model_executor/layers/fused_moe/fused_moe.py",)
PACKAGES = ("vllm", "torch")
_UTILISATION = 0.9  # vLLM's own default, of a device that it has for itself

_USED = re.compile(r"Using configuration from (.+?\.json) for MoE layer")
_DEFAULT = re.compile(r"Using default MoE config\.[^\n]*?(?:Config file not found at|tried:) ?\[?'?([^\n]+?\.json)")
_BACKEND = re.compile(r"Using ['\"]?(\w+)['\"]? (?:\w+ )?MoE backend", re.IGNORECASE)
_ATTENTION = re.compile(r"Using (\S+) (?:attention )?backend\b")
_RUNNING = re.compile(r"Running: (\d+) reqs")


class VllmEngine:
    """A vLLM server in this environment."""

    name = "vllm"
    ready_s = 1800.0

    def command(self, spec: Spec, work: Path, port: int) -> Command:
        """`vllm serve`, bound to this host."""
        argv = [foreign.python(), "-m", "vllm.entrypoints.cli.main", "serve", str(foreign.model_dir(spec, work)),
                "--host", HOST, "--port", str(port), "--moe-backend", spec.backend,
                "--dtype", spec.dtype if spec.dtype in _DTYPES else "auto", "--seed", str(spec.seed),
                "--tensor-parallel-size", str(spec.tp), "--no-enable-prefix-caching"]  # fmt: skip
        if spec.weights == "random":
            argv += ["--load-format", "dummy"]
        if spec.ep > 1:
            argv += ["--enable-expert-parallel"]
        if spec.graph == "eager":
            argv += ["--enforce-eager"]
        if spec.slots:
            argv += ["--max-num-seqs", str(spec.slots)]
        if spec.memory_share < 1:
            argv += ["--gpu-memory-utilization", f"{_UTILISATION * spec.memory_share:.3f}"]
        if spec.length:
            argv += ["--max-model-len", str(spec.length)]
        env = {"VLLM_TUNED_CONFIG_FOLDER": str(_flat_folder(spec, work)), "HF_HUB_OFFLINE": "1"}
        if key := os.environ.get(apikey.VARIABLE):
            env["VLLM_API_KEY"] = key
        return Command((*argv, *spec.extra), env)

    def base_url(self, work: Path, port: int) -> str | None:
        """It takes the port it is given."""
        return f"http://{HOST}:{port}"

    def account(self, launched: Launched) -> Account:
        """Proof from the log and a probe of its environment."""
        text = launched.log.read_text(encoding="utf-8", errors="replace")
        found = lookups(text)
        about = foreign.probe(foreign.python(), PACKAGES, SOURCES, os.environ)
        named = _BACKEND.search(text)
        spec = launched.spec
        resolved = "triton" if found else (named[1].lower() if named else _unnamed(about))
        sizes = foreign.count_matches(_RUNNING, text)
        sizes.pop(0, None)
        return Account(
            device=about.device,
            proof=Proof(
                engine=self.name,
                requested_backend=spec.backend,
                resolved_backend=resolved,
                chain=({"backend": resolved, "chosen": True,
                        "why": "its log tells of config lookups" if found else "no config lookup in its log"},),
                configs_root=None if spec.configs is None else str(foreign.config_folder(spec.configs)),
                configs_digest=foreign.tree_digest(spec.configs),
                configs=tuple(foreign.config_uses(OP, found, sorted(sizes), sizes)),
                kernel_hash=about.kernel_hash,
                functions=functions(text, resolved),
            ),
            environment=about.versions,
            batch_sizes={str(m): count for m, count in sorted(sizes.items())},
        )  # fmt: skip


_DTYPES = frozenset({"auto", "half", "float16", "bfloat16", "float", "float32"})


def _unnamed(about: foreign.Probe) -> str:
    """vLLM's CPU build has one fused-MoE kernel and logs no name for it."""
    return "cpu" if about.device.kind == "cpu" else "unknown"


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "0.0.0"


def _flat_folder(spec: Spec, work: Path) -> Path:
    """vLLM's form of the tree: up configs under vLLM's names in one folder."""
    target = work / "vllm-configs"
    target.mkdir(exist_ok=True)
    if spec.configs is None:
        return target
    tree = ConfigTree(spec.configs)
    order = [(name, "") for name in tree.directories] if tree.flat else search_order(list(tree.directories), _triton())
    for directory, _ in reversed(order):  # the best match last: it overwrites
        for name in tree.directories[directory]:
            parsed = parse_name(name)
            if parsed is not None and isinstance(parsed.key, ConfigKey) and parsed.projection == "up":
                source = tree.path(f"{directory}/{name}" if directory else name)
                shutil.copy(source, target / format_name(parsed.key, "up", "vllm"))
    return target


def functions(log: str, resolved: str) -> dict[str, str]:
    """What ran per operator, as far as a log tells: the class of the experts, and the attention backend."""
    experts, attention = _BACKEND.search(log), _ATTENTION.search(log)
    found = {OP: experts[1] if experts else resolved}
    return found if attention is None else {**found, "attention": attention[1]}


def lookups(log: str) -> list[foreign.Lookup]:
    """Every lookup that a log tells of, each once, in order."""
    found: dict[str, foreign.Lookup] = {}
    for match in _USED.finditer(log):
        found.setdefault(match[1], foreign.Lookup("up", Path(match[1]), "exact"))
    for match in _DEFAULT.finditer(log):
        found.setdefault(match[1], foreign.Lookup("up", None, "default"))
    return list(found.values())
