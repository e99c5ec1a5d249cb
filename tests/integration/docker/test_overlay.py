"""Our environment over an engine's interpreter: the engine's torch and Triton stay, and it never sees us."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moegate.records import ImageSpec
from orchestrator.images import BuildFailure, BuiltImage, ensure
from orchestrator.images.build import ClassicBuilder
from orchestrator.images.preflight import stale_wheel

pytestmark = [pytest.mark.docker, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]
# An "engine": an interpreter of its own with the packages that engines share with us, and a vendor's build of torch and
# Triton that no index has. Only their names and versions matter to pip.
ENGINE = """\
# moegate-context: context
# moegate-network: none
ARG BASE=moegate-base:bookworm
FROM ${BASE} AS engine
COPY wheels/ /wheels/
RUN python3 -m venv /opt/engine \\
    && /opt/engine/bin/python -m pip install --no-cache-dir --no-compile --no-index --no-deps /wheels/*.whl
COPY fake.py /fake.py
RUN /opt/engine/bin/python /fake.py
COPY own/ /own/
RUN sh /own/overlay.sh /opt/engine/bin/python /own --no-index
USER 10001:10001
"""
FAKE = """\
import pathlib, sysconfig
site = pathlib.Path(sysconfig.get_paths()["purelib"])
for name, version in (("torch", "2.14.0+vendor"), ("triton", "3.8.0+vendor")):
    (site / name).mkdir()
    (site / name / "__init__.py").write_text(f"__version__ = {version!r}\\n")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    (info / "INSTALLER").write_text("vendor\\n")
"""
LEFT_OUT = ("torch-", "triton-", "sympy-", "networkx-", "mpmath-", "fsspec-", "setuptools-")


@pytest.fixture
def project(tmp_path: Path, cpu_image: BuiltImage) -> Iterator[Path]:
    house = ROOT / "wheelhouse"
    assert stale_wheel(house) is None
    context = tmp_path / "context"
    (tmp_path / "dockerfiles").mkdir()
    (tmp_path / "dockerfiles" / "engine.Dockerfile").write_text(ENGINE)
    shutil.copytree(house / "own", context / "own")
    (context / "wheels").mkdir()
    for wheel in (house / "third-party").glob("*.whl"):
        if not wheel.name.startswith(LEFT_OUT):
            shutil.copy(wheel, context / "wheels")
    (context / "fake.py").write_text(FAKE)
    yield tmp_path
    shutil.rmtree(context)


def build(root: Path, spec: ImageSpec, logs: Path) -> BuiltImage:
    image = ensure([spec], root, logs, version="0", builder=ClassicBuilder(), timeout_s=300)[spec.name]
    assert not isinstance(image, BuildFailure), f"{image.reason}\n{image.tail}"
    return image


def test_the_engine_keeps_its_torch_and_never_sees_us(client: Any, project: Path) -> None:
    image = build(project, ImageSpec("test-engine", dockerfile="dockerfiles/engine.Dockerfile"), project / "logs")

    def python(home: str, code: str) -> str:
        argv = [f"/opt/{home}/bin/python", "-P", "-c", code]
        output = client.containers.run(image.id, argv, remove=True, network_mode="none", stderr=True)
        return bytes(output).decode().strip()

    try:
        seen = "import torch, triton, moegate; print(torch.__version__, triton.__version__, torch.__file__)"
        assert python("moegate", seen).split()[:2] == ["2.14.0+vendor", "3.8.0+vendor"]
        assert "/opt/engine/" in python("moegate", seen)
        assert python("engine", "import importlib.util as u; print(u.find_spec('moegate'))") == "None"
        assert "0" in python("moegate", "import serving.load, tuner.cli, orchestrator.cli; print(0)")
    finally:
        client.images.remove(image.tag, force=True)


@pytest.mark.parametrize("vendor", ["cuda", "rocm", "xpu"])
def test_the_stage_that_needs_no_vendor_base_builds(
    client: Any, cpu_image: BuiltImage, vendor: str, tmp_path: Path
) -> None:
    spec = ImageSpec(
        f"test-{vendor}",
        dockerfile=f"dockerfiles/{vendor}.Dockerfile",
        target="own",
        args={"TOOLS_BASE": "moegate-base:bookworm"},
    )
    image = build(ROOT, spec, tmp_path)
    client.images.remove(image.tag, force=True)
