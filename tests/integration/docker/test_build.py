"""The classic builder against the real daemon."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from moegate.records import ImageSpec
from orchestrator.images import BuildFailure, BuiltImage, ensure, write_provenance
from orchestrator.images.build import ClassicBuilder

pytestmark = pytest.mark.docker

BASE = "moegate-base:bookworm"


@pytest.fixture
def project(tmp_path: Path, base: str) -> Path:
    (tmp_path / "dockerfiles").mkdir()
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "file").write_text("content")
    return tmp_path


def write(project: Path, name: str, body: str) -> ImageSpec:
    text = f"# moegate-context: context\n# moegate-network: none\nARG BASE={BASE}\nFROM ${{BASE}} AS runner\n{body}"
    (project / "dockerfiles" / f"{name}.Dockerfile").write_text(text)
    return ImageSpec(name=f"test-{name}", dockerfile=f"dockerfiles/{name}.Dockerfile", target="runner")


def build(project: Path, *specs: ImageSpec, timeout_s: float = 120.0) -> dict[str, BuiltImage | BuildFailure]:
    return ensure(specs, project, project / "logs", version="1.2.3", builder=ClassicBuilder(), timeout_s=timeout_s)


def test_an_image_is_built_once_and_described(client: Any, project: Path) -> None:
    spec = write(project, "good", f"COPY file /file\nRUN echo {time.time_ns()} >/when\n")
    image = build(project, spec)[spec.name]
    assert isinstance(image, BuiltImage), image
    try:
        assert image.built
        assert image.id.startswith("sha256:")
        assert image.python.startswith("Python 3.11")
        assert image.system
        labels = client.images.get(image.tag).labels
        assert labels["org.opencontainers.image.version"] == "1.2.3"
        assert labels["org.opencontainers.image.base.name"] == BASE
        again = build(project, spec)[spec.name]
        assert isinstance(again, BuiltImage)
        assert not again.built
        assert (again.id, again.tag, again.system) == (image.id, image.tag, image.system)
        written = json.loads(write_provenance(project / "logs", [again]).read_text())
        (row,) = written["images"]
        assert (written["schema"], row["id"], row["system"]) == (1, image.id, image.system)
        assert row["python"].startswith("Python 3.11")
        assert any(line.startswith("pip==") for line in row["packages"])
    finally:
        client.images.remove(image.tag, force=True)


def test_a_failed_build_is_a_value_with_its_last_lines(client: Any, project: Path) -> None:
    bad = write(project, "bad", "RUN echo about to fail && false\n")
    good = write(project, "fine", "COPY file /file\n")
    result = build(project, bad, good)
    failure, image = result[bad.name], result[good.name]
    assert isinstance(failure, BuildFailure)
    assert "about to fail" in failure.tail
    assert "returned a non-zero code" in failure.reason
    assert isinstance(image, BuiltImage)
    client.images.remove(image.tag, force=True)


def test_a_build_over_its_time_is_stopped_with_its_container(client: Any, project: Path) -> None:
    mark = f"sleep 12{time.time_ns() % 1000:03d}"
    began = time.monotonic()
    failure = build(project, write(project, "slow", f"RUN {mark}\n"), timeout_s=4.0)["test-slow"]
    assert isinstance(failure, BuildFailure)
    assert failure.timed_out
    assert time.monotonic() - began < 300, "the command sleeps for three hours"
    until = time.monotonic() + 15
    while time.monotonic() < until:
        running = [c for c in client.containers.list() if mark in " ".join(c.attrs["Config"]["Cmd"] or [])]
        if not running:
            break
        time.sleep(0.3)
    assert running == []
