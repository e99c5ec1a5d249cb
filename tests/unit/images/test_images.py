"""What an image is named after, what bake is told, and the builder against a stand-in docker client that records."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest

from moegate.errors import UsageError
from moegate.records import ImageSpec
from orchestrator.images import bake
from orchestrator.images.build import BakeBuilder, ClassicBuilder, builder_for
from orchestrator.images.preflight import stale_wheel
from orchestrator.images.request import read_recipe, request
from tests.standin.programs import write_program

DOCKERFILE = """\
# moegate-context: context
# moegate-network: none
ARG BASE=base:1
ARG TORCH=2.13.0
FROM ${BASE} AS packages
RUN echo packages
FROM ${BASE} AS runner
COPY . /opt/
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "dockerfiles").mkdir()
    (tmp_path / "dockerfiles" / "x.Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "file").write_text("one")
    return tmp_path


def spec(**changes: object) -> ImageSpec:
    return ImageSpec(**({"name": "x", "dockerfile": "dockerfiles/x.Dockerfile"} | changes))  # type: ignore[arg-type]


def test_a_recipe_is_read_from_the_dockerfile(project: Path) -> None:
    recipe = read_recipe(project / "dockerfiles" / "x.Dockerfile")
    assert recipe.args == {"BASE": "base:1", "TORCH": "2.13.0"}
    assert recipe.stages == ("packages", "runner")
    assert recipe.context == project / "context"
    assert recipe.network == "none"
    assert recipe.bases("runner", {}) == ("base:1",)
    assert recipe.bases(None, {"BASE": "base:2"}) == ("base:2",)


def test_the_bases_of_a_target_are_those_of_its_own_stages(project: Path) -> None:
    file = project / "dockerfiles" / "y.Dockerfile"
    file.write_text(
        "ARG BASE=a:1\nARG OTHER=b/c:2\nARG ENGINE=d:3\nFROM ${OTHER} AS tools\nFROM ${BASE} AS runner\n"
        "COPY --from=tools /x /x\nFROM ${ENGINE} AS engine\nCOPY --chown=1:1 --from=tools /x /x\n"
        "FROM engine AS last\nFROM scratch AS nothing\n"
    )
    recipe = read_recipe(file)
    assert recipe.bases("runner", {}) == ("a:1", "b/c:2")
    assert recipe.bases("last", {"ENGINE": "e:4"}) == ("b/c:2", "e:4")
    assert recipe.bases("nothing", {}) == ()


def test_the_tag_follows_the_content_and_nothing_else(project: Path) -> None:
    first = request(spec(), project, labels={"when": "now"})
    assert first.tag == f"moegate/x:{first.digest[:16]}"
    assert request(spec(), project, labels={"when": "later"}).tag == first.tag
    changed = {
        "argument": request(spec(args={"TORCH": "2.14.0"}), project).tag,
        "target": request(spec(target="packages"), project).tag,
        "base": request(spec(base="base:2"), project).tag,
        "base content": request(spec(), project, base_ids={"base:1": "sha256:1"}).tag,
    }
    (project / "context" / "file").write_text("two")
    changed["context"] = request(spec(), project).tag
    (project / "dockerfiles" / "x.Dockerfile").write_text(DOCKERFILE + "RUN true\n")
    changed["dockerfile"] = request(spec(), project).tag
    assert len({first.tag, *changed.values()}) == 1 + len(changed)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"args": {"TORHC": "1"}}, "BASE, TORCH"),
        ({"target": "nothing"}, "packages, runner"),
        ({"dockerfile": "dockerfiles/none"}, "cannot read"),
        ({"dockerfile": None}, "no dockerfile"),
    ],
)
def test_what_does_not_exist_is_named(project: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        request(spec(**changes), project)


def test_a_context_outside_the_project_is_refused(project: Path) -> None:
    file = project / "dockerfiles" / "x.Dockerfile"
    file.write_text(DOCKERFILE.replace("moegate-context: context", "moegate-context: ../elsewhere"))
    with pytest.raises(UsageError, match="outside"):
        read_recipe(file)


def test_bake_is_told_what_the_classic_builder_is_told(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(bake.CACHE_VARIABLE, raising=False)
    item = request(spec(target="runner", args={"TORCH": "2.14.0"}), project, labels={"b": "2", "a": "1"})
    document = bake.bake_file([item])
    assert document["group"] == {"default": {"targets": ["x"]}}
    assert document["target"]["x"] == {
        "context": str(project / "context"),
        "dockerfile": str(project / "dockerfiles" / "x.Dockerfile"),
        "args": {"TORCH": "2.14.0"},
        "labels": {"a": "1", "b": "2"},
        "tags": [item.tag],
        "target": "runner",
        "network": "none",
        "output": ["type=docker"],
        "attest": ["type=provenance,disabled=true", "type=sbom,disabled=true"],
    }


def test_the_build_cache_is_scoped_by_image(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bake.CACHE_VARIABLE, "type=local,dest=/var/cache/{name}")
    target = bake.bake_file([request(spec(name="sglang.xpu"), project)])["target"]["sglang-xpu"]
    assert target["cache-from"] == ["type=local,src=/var/cache/sglang-xpu"]
    assert target["cache-to"] == ["type=local,dest=/var/cache/sglang-xpu,mode=max"]
    assert set(target) <= bake.TARGET_FIELDS


def test_two_images_with_one_target_name_are_refused(project: Path) -> None:
    with pytest.raises(UsageError, match="a-b"):
        bake.bake_file([request(spec(name="a.b"), project), request(spec(name="a-b"), project)])


STAND_IN = """\
import json, os, sys, time
here = os.path.dirname(os.path.abspath(sys.argv[0]))
with open(os.path.join(here, "calls.jsonl"), "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1:3] == ["buildx", "version"]:
    sys.exit(0)
options = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--"))
names = [a for a in sys.argv[3:] if not a.startswith("--")]
document = json.load(open(options["file"]))
bad = [n for n in names if n.startswith("bad")]
if any(n.startswith("slow") for n in names):
    time.sleep(60)
if bad:
    print("ERROR: failed to solve: " + bad[0])
    sys.exit(1)
json.dump({n: {"containerimage.config.digest": "sha256:" + n} for n in names}, open(options["metadata-file"], "w"))
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A `docker` that records its calls and does what buildx bake promises."""
    return write_program(tmp_path / "bin" / "docker", STAND_IN)


def calls(stand_in: Path) -> list[list[str]]:
    return [json.loads(line) for line in (stand_in.parent / "calls.jsonl").read_text().splitlines()]


def test_bake_builds_all_images_in_one_call(project: Path, stand_in: Path) -> None:
    items = [request(spec(name="one"), project), request(spec(name="two"), project)]
    result = BakeBuilder(str(stand_in)).build(items, project / "logs")
    assert result == {"one": None, "two": None}
    (call,) = calls(stand_in)
    assert call[:2] == ["buildx", "bake"]
    assert call[-2:] == ["one", "two"]


def test_a_failed_image_blocks_only_itself(project: Path, stand_in: Path) -> None:
    items = [request(spec(name="bad"), project), request(spec(name="good"), project)]
    result = BakeBuilder(str(stand_in)).build(items, project / "logs")
    assert result["good"] is None
    assert result["bad"] is not None
    assert "failed to solve: bad" in result["bad"].reason
    assert "failed to solve: bad" in result["bad"].tail


def test_a_build_that_hangs_is_stopped(project: Path, stand_in: Path) -> None:
    item = request(spec(name="slow"), project, timeout_s=1.0)
    failure = BakeBuilder(str(stand_in)).build([item], project / "logs")["slow"]
    assert failure is not None
    assert failure.timed_out


def test_buildx_is_used_where_it_is(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}")
    assert isinstance(builder_for(), BakeBuilder)
    monkeypatch.setenv("PATH", str(stand_in.parent.parent))
    assert isinstance(builder_for(), ClassicBuilder)


def test_a_wheel_that_is_not_this_source_tree_is_stale(tmp_path: Path) -> None:
    assert "0 wheels" in (stale_wheel(tmp_path) or "")
    with zipfile.ZipFile(tmp_path / "moegate-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("moegate/__init__.py", "")
    assert "is not this source tree" in (stale_wheel(tmp_path) or "")
