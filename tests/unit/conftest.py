"""Fixtures that several areas share: engines' wheels from the package index, and small trees of config files."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "wheels"
# What is unpacked of each wheel: sources and config files, nothing binary.
KEPT = (".py", ".json")


def _download(name: str, version: str) -> Path:
    target = CACHE / f"{name}-{version}"
    if target.is_dir():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        folder = Path(temporary)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
             "--disable-pip-version-check", "--dest", str(folder), f"{name}=={version}"],
            check=True, capture_output=True, timeout=240, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
            archive.extractall(folder / "tree", [n for n in archive.namelist() if n.endswith(KEPT)])
        with contextlib.suppress(OSError):  # another process was faster
            (folder / "tree").rename(target)
    return target


@pytest.fixture(scope="session")
def wheel() -> Callable[[str, str], Path]:
    """Unpack a released wheel into an ignored cache; offline the test is skipped, in CI it fails."""

    def get(name: str, version: str) -> Path:
        try:
            return _download(name, version)
        except (subprocess.SubprocessError, OSError) as error:
            reason = f"{name} {version} cannot be had from the package index ({type(error).__name__}); connect to one"
            if os.environ.get("CI") == "true":
                pytest.fail(reason)
            pytest.skip(reason)

    return get


@pytest.fixture(scope="session")
def sglang_wheel(wheel: Callable[[str, str], Path]) -> Path:
    """The unpacked sglang 0.5.23 wheel."""
    return wheel("sglang", "0.5.23")


@pytest.fixture(scope="session")
def sglang_configs(sglang_wheel: Path) -> Path:
    """The folder with its fused-MoE `configs/`."""
    return sglang_wheel / "sglang/srt/layers/moe/moe_runner/triton_utils"
