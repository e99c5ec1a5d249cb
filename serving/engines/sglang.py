"""SGLang (`python -m sglang.launch_server`), as released: flags of 0.5.23.

Its lookup reads `$SGLANG_MOE_CONFIG_DIR/configs/triton_X_Y_Z/`; an empty `configs/` is the untuned arm. It logs once
per key and process which file answered, and why. A server that never logs a lookup did not run the Triton kernel,
whatever backend was asked for: that is its proof.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from moegate.errors import InfraError
from moegate.records import Proof
from serving.account import Account
from serving.engines import foreign
from serving.engines.protocol import HOST, Command, Launched, Spec, get_json

__all__ = ["SglangEngine", "lookups"]

OP = "fused_experts"
SOURCES = (
    "kernels/ops/moe/fused_moe_triton_kernels.py",
    "srt/layers/moe/moe_runner/triton_utils/fused_moe.py",
    "srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_config.py",
)
_STATIC_SHARE = 0.88  # of a device's memory for weights and cache, where it has the device for itself
PACKAGES = ("sglang", "torch", "sglang-kernel")

_LINE = re.compile(
    r"(?P<exact>Using MoE kernel config from (?P<used>\S+\.json))"
    r"|(?P<fallback>Config file not found at (?P<missing>.+?\.json)\. Fallback to triton version (?P<version>\S+) and "
    r"use MoE kernel config from (?P<other>.+?\.json))"
    r"|(?P<reused>Down MoE config file not found at (?P<down>.+?\.json); reusing the tuned up-projection config)"
    r"|(?P<default>Using default MoE kernel config\.[^\n]*?Config file not found at (?P<nothing>.+?\.json))"
)
_EXACT = re.compile(r"Using MoE kernel config from (.+?\.json)")
_DECODE = re.compile(r"Decode batch[^\n]*?#running-req: (\d+)")
_PREFILL = re.compile(r"Prefill batch[^\n]*?#new-token: (\d+)")
_MEMORY = re.compile(r"peak[^\n]*?mem(?:ory)?[^\n]*?([0-9.]+) ?GB", re.IGNORECASE)


class SglangEngine:
    """An SGLang server in this environment."""

    name = "sglang"
    ready_s = 1800.0

    def command(self, spec: Spec, work: Path, port: int) -> Command:
        """`python -m sglang.launch_server`, bound to this host."""
        argv = [foreign.python(), "-m", "sglang.launch_server", "--model-path", str(foreign.model_dir(spec, work)),
                "--host", HOST, "--port", str(port), "--moe-runner-backend", spec.backend,
                "--dtype", spec.dtype if spec.dtype in _DTYPES else "auto", "--random-seed", str(spec.seed),
                "--tp-size", str(spec.tp), "--ep-size", str(spec.ep), "--disable-radix-cache"]  # fmt: skip
        if spec.weights == "random":
            argv += ["--load-format", "dummy"]
        if spec.graph == "eager":
            argv += ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
        if spec.slots:
            argv += ["--max-running-requests", str(spec.slots)]
        if spec.memory_share < 1:
            argv += ["--mem-fraction-static", f"{_STATIC_SHARE * spec.memory_share:.3f}"]
        if spec.length:
            argv += ["--context-length", str(spec.length)]
        env = {"SGLANG_MOE_CONFIG_DIR": str(_config_dir(spec, work)), "HF_HUB_OFFLINE": "1"}
        return Command((*argv, *spec.extra), env)

    def base_url(self, work: Path, port: int) -> str | None:
        """It takes the port it is given."""
        return f"http://{HOST}:{port}"

    def account(self, launched: Launched) -> Account:
        """Proof from the log, the server's own arguments, and a probe of its environment."""
        text = launched.log.read_text(encoding="utf-8", errors="replace")
        found = lookups(text)
        told = get_json(launched.base_url, "/server_info")
        if not isinstance(told, dict):
            raise InfraError("/server_info holds no object")
        about = foreign.probe(foreign.python(), PACKAGES, SOURCES, os.environ)
        sizes = foreign.count_matches(_DECODE, text) + foreign.count_matches(_PREFILL, text)
        backend = str(told.get("moe_runner_backend") or launched.spec.backend)
        resolved = "triton" if found else backend
        spec = launched.spec
        peaks = [float(value) for value in _MEMORY.findall(text)]
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
                functions={OP: resolved, **{op: str(told[key]) for op, key in _TOLD.items() if told.get(key)}},
            ),
            environment=about.versions,
            batch_sizes={str(m): count for m, count in sorted(sizes.items())},
            peak_memory_bytes=int(max(peaks) * 1e9) if peaks else None,
        )  # fmt: skip


_TOLD = {"attention": "attention_backend", "sampling": "sampling_backend", "fp8_gemm": "fp8_gemm_runner_backend"}
_DTYPES = frozenset({"auto", "half", "float16", "bfloat16", "float", "float32"})


def _config_dir(spec: Spec, work: Path) -> Path:
    """A folder whose `configs/` is the tree that was asked for."""
    if spec.configs is None:
        return foreign.empty_tree(work)
    if (spec.configs / "configs").is_dir():
        return spec.configs
    if spec.configs.name == "configs":
        return spec.configs.parent
    root = work / "tuned"
    root.mkdir(exist_ok=True)
    (root / "configs").symlink_to(spec.configs.resolve(), target_is_directory=True)
    return root


def lookups(log: str) -> list[foreign.Lookup]:
    """Every lookup that a log tells of, each once, in order."""
    found: dict[tuple[str, str], foreign.Lookup] = {}
    up: Path | None = None
    for match in _LINE.finditer(log):
        name = match["used"] or match["missing"] or match["down"] or match["nothing"]
        if match["exact"]:
            name = _EXACT.match(match[0])[1] if _EXACT.match(match[0]) else name  # type: ignore[index]
        projection = foreign.projection_of(name)
        file, reason = _answer(match, name, up)
        if projection == "up":
            up = file
        found.setdefault((projection, name), foreign.Lookup(projection, file, reason))
    return list(found.values())


def _answer(match: re.Match[str], name: str, up: Path | None) -> tuple[Path | None, str]:
    if match["exact"]:
        return Path(name), "exact"
    if match["fallback"]:
        return Path(match["other"]), _direction(name, match["version"])
    if match["reused"]:
        return up, "up-config"
    return None, "default"


def _direction(missing: str, version: str) -> str:
    """`older-triton` or `newer-triton`: which way the fallback went from the version that was wanted."""
    wanted = [int(n) for n in re.findall(r"\d+", Path(missing).parent.name)]
    return "newer-triton" if [int(n) for n in re.findall(r"\d+", version)] > wanted else "older-triton"
