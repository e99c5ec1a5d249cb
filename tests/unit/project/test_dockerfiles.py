"""The Dockerfiles: clean under hadolint, alike in what matters, and readable by our own builder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from moegate.records import ImageSpec
from orchestrator.images.request import read_recipe, request

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "dockerfiles").glob("*.Dockerfile"))
VENDORS = [file for file in FILES if file.name != "cpu.Dockerfile"]


def name(file: Path) -> str:
    return file.name


def final_stages(text: str) -> dict[str, str]:
    """The stages that become images (those with a CMD), by name."""
    parts = re.split(r"(?m)^FROM ", text)[1:]
    return {m[1]: part for part in parts if (m := re.match(r"\S+ AS (\w+)", part)) and "\nCMD " in part}


def test_there_is_one_per_kind_of_device() -> None:
    assert [file.name.split(".")[0] for file in FILES] == ["cpu", "cuda", "rocm", "xpu"]


@pytest.mark.parametrize("file", FILES, ids=name)
def test_hadolint_finds_nothing(file: Path) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, str(file)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=name)
def test_every_image_is_non_root_labelled_and_has_a_cache_folder(file: Path) -> None:
    stages = final_stages(file.read_text())
    assert stages
    for stage, text in stages.items():
        users = re.findall(r"(?m)^USER (\S+)$", text)
        assert users[-1] == "10001:10001", stage
        for label in ("title", "description", "licenses"):
            assert f"org.opencontainers.image.{label}=" in text, (stage, label)
        assert "install -d -m 1777 /cache" in text, stage


@pytest.mark.parametrize("file", FILES, ids=name)
def test_no_index_configuration_or_certificate_stays_in_an_image(file: Path) -> None:
    text = file.read_text()
    for word in ("pip.conf", "pip config", "PIP_INDEX_URL", "PIP_CERT", "ca-bundle", "--trusted-host"):
        assert word not in text
    # Written for the classic builder too.
    assert not re.search(r"(?m)^RUN --mount|^RUN <<|^# syntax=", text)


@pytest.mark.parametrize("file", FILES, ids=name)
def test_bases_are_pinned(file: Path) -> None:
    for image in (value for key, value in read_recipe(file).args.items() if key.endswith("BASE")):
        assert image is not None
        assert re.search(r":([\w.+-]*\d|bookworm)", image), image


@pytest.mark.parametrize("file", VENDORS, ids=name)
def test_vendor_targets_and_arguments(file: Path) -> None:
    recipe = read_recipe(file)
    assert {"runner", "sglang", "vllm"} <= set(recipe.stages)
    assert {"TORCH", "TRITON", "TORCH_INDEX"} <= set(recipe.args)
    assert recipe.context == ROOT / "wheelhouse" / "own"


def test_the_b60_matrix_asks_for_arguments_that_exist() -> None:
    args = {"SGLANG": "0.5.23", "TRITON": "3.8.0+xpu"}
    item = request(ImageSpec("x", dockerfile="dockerfiles/xpu.Dockerfile", target="sglang", args=args), ROOT)
    assert item.recipe.bases(item.target, item.args) == (
        "docker.io/intel/deep-learning-essentials:2025.3.2-0-devel-ubuntu24.04",
    )
