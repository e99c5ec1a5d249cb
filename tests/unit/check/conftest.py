"""A small repository of configs, a model, a family table, a dispatch lock and an engine's source, under git."""

from __future__ import annotations

import json
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from moegate.configs import ConfigKey, format_name
from moegate.dispatch import lock

PROJECT = Path(__file__).resolve().parents[3]
GOOD = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
SIZES = (1, 16, 64, 256)
SOURCE = """
    def dispatch_w8a8_block_fp8_linear():
        backend = get_fp8_gemm_runner_backend()
        if not backend.is_auto():
            return _dispatch_explicit_backend(backend)
        return _dispatch_auto_backend()

    def _dispatch_explicit_backend(backend):
        if backend.is_cutlass():
            return cutlass_linear
        elif backend.is_triton():
            return triton_linear
        raise ValueError(backend)

    def _dispatch_auto_backend():
        if _is_npu:
            return npu_linear
        elif _is_xpu:
            return torch_linear
        return triton_linear
"""


class Repo:
    """One checkout with everything that `check` compares."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.configs = root / "kernels" / "configs"
        self.model = root / "examples" / "models" / "m" / "config.json"
        self.source = root / "engine"
        self.table = root / "moegate" / "families" / "table.py"

    def file(self, key: ConfigKey, projection: str = "up", triton: str = "triton_3_8_0") -> Path:
        """The path of one config file."""
        return self.configs / triton / format_name(key, projection)  # type: ignore[arg-type]

    def write(self, path: Path, data: Any) -> None:
        """Write JSON (or text) in place, as an editor would."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data if isinstance(data, str) else json.dumps(data, indent=4) + "\n")

    def edit(self, path: Path, old: str, new: str) -> None:
        """Replace text that must be there, once."""
        text = path.read_text()
        assert old in text, f"{old!r} is not in {path}"
        path.write_text(text.replace(old, new, 1))

    def git(self, *arguments: str) -> None:
        """Run git in the checkout."""
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=self.root, check=True,
                       capture_output=True, stdin=subprocess.DEVNULL)  # fmt: skip


def entries(block_n: int, **extra: Any) -> dict[str, Any]:
    """A file's content that no other file has."""
    return {str(size): {**GOOD, "BLOCK_SIZE_N": block_n, "GROUP_SIZE_M": size, **extra} for size in SIZES}


KEY = ConfigKey(64, 896, "NVIDIA_H200")
FP8 = ConfigKey(64, 896, "NVIDIA_H200", "fp8_w8a8", (128, 128))


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """A clean checkout, committed."""
    made = Repo(tmp_path / "repo")
    made.write(made.file(KEY), entries(64))
    made.write(made.file(KEY, "down"), entries(128, USE_TMA=True))
    made.write(made.file(FP8), entries(32))
    made.write(made.file(KEY.on("NVIDIA_B200")), entries(256))
    model = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_routed_experts": 63,
        "num_experts_per_tok": 6,
        "hidden_size": 1280,
        "moe_intermediate_size": 896,
        "num_hidden_layers": 12,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    }
    made.write(made.model, model)
    made.table.parent.mkdir(parents=True)
    shutil.copy(PROJECT / "moegate" / "families" / "table.py", made.table)
    lock.write(made.root / "kernels" / "dispatch.lock.json")
    source = made.source / "sglang/srt/layers/quantization/fp8_utils.py"
    made.write(source, textwrap.dedent(SOURCE))
    made.git("init", "-q", "-b", "main")
    made.git("add", "-A")
    made.git("commit", "-q", "-m", "start")
    return made
