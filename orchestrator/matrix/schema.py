"""The shape of matrix.yaml: every key, its type, its default and one line of what it means.

`orchestrator schema` prints this as JSON Schema, and docs/matrix.md is checked against it.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from moegate.records.plan import CellKind
from orchestrator.cells import KINDS
from orchestrator.cells.base import CellSpec
from orchestrator.scalars import (
    Count,
    Duration,
    Env,
    Futility,
    GitRef,
    Line,
    Many,
    Metric,
    Name,
    PairCount,
    PathText,
    Share,
    Whole,
    fail,
)

__all__ = ["AnyCell", "Arm", "Compare", "Defaults", "Gate", "Image", "MatrixSpec", "Model", "Pool", "json_schema"]


class _Strict(BaseModel):
    """No key that is not declared; values are never changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _reference(value: Any) -> Any:
    return {"reference": value} if isinstance(value, str) else value


class Image(_Strict):
    """An image to build, or the reference of one that exists."""

    dockerfile: PathText | None = Field(default=None, description="path in the repository")
    target: Line | None = Field(default=None, description="stage of the Dockerfile")
    args: Env = Field(default={}, description="build arguments (never secrets)")
    env: Env = Field(default={}, description="variables of every child, under process isolation too")
    base: Line | None = Field(default=None, description="base image, passed as BASE")
    reference: Line | None = Field(default=None, description="an existing image, name@sha256:digest")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.dockerfile is None) == (self.reference is None):
            raise fail("needs dockerfile or reference, one of them", "write `dockerfile: dockerfiles/cpu.Dockerfile`")
        digest = (self.reference or "@sha256:").partition("@sha256:")
        if self.reference and (len(digest[2]) != 64 or not set(digest[2]) <= set("0123456789abcdef")):
            raise fail("the image reference has no digest", "write it as name@sha256:... (64 hex digits)")
        return self


class Pool(_Strict):
    """A set of equal device slots."""

    device: Literal["cpu", "cuda", "rocm", "xpu"]
    image: Name | None = Field(default=None, description="what containers of this pool run")
    isolation: Literal["auto", "docker", "process"] = "auto"
    slots: Count = Field(default=1, description="devices (CPU: disjoint CPU sets); fewer on the host is exit 3")
    ray: Annotated[str, BeforeValidator(lambda value: _ray(value))] = Field(
        default="local", description="local, none (plain slots on this host) or host:port of a cluster"
    )
    labels: dict[Name, Line] = {}
    device_name: Line | None = Field(default=None, description="what the driver must call the device")


def _ray(value: Any) -> str:
    import re

    if value in ("local", "none") or (
        isinstance(value, str) and re.fullmatch(r"(ray://)?[A-Za-z0-9][A-Za-z0-9.-]{0,200}:[0-9]{2,5}", value)
    ):
        return str(value)
    raise fail(f"{str(value)[:80]!r} is neither local, none nor an address", "write local, none or host:port")


class Model(_Strict):
    """A model by its config.json (data only; nothing of a model directory is executed)."""

    config: PathText = Field(description="a config.json or its folder")
    weights: PathText = Field(default="random", description="random, or a path on the pool's host, mounted read-only")
    revision: Line | None = None
    tp: Count = 1
    ep: Count = 1
    dtype: Literal["bfloat16", "float16", "float32"] | None = Field(default=None, description="default: the config's")
    quantization: Line | None = None


class Arm(_Strict):
    """One side of the comparison."""

    configs: PathText = Field(default="none", description="none, tuned, a directory or git:REF")
    env: Env = {}
    source: GitRef | None = Field(default=None, description="a git ref, installed into an environment of its own")


class Compare(_Strict):
    """Which arms, and how many pairs of launches."""

    baseline: Name
    candidate: Name
    expect: Literal["improved", "no_regression", "equal"] = "no_regression"
    screen: PairCount = Field(default=5, description="pairs that every cell gets")
    confirm: PairCount = Field(default=60, description="further pairs for cells that moved")
    futility: Futility = Field(default=10, description="fresh pairs after which a hopeless cell stops, or none")


class Quarantine(_Strict):
    """Cells that run but do not gate, for a reason and until a day."""

    cells: Line
    reason: Line
    until: Annotated[str, BeforeValidator(lambda value: _date(value))] = Field(description="a day, 2027-01-31 (UTC)")


def _date(value: Any) -> str:
    from datetime import date

    try:
        return date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise fail(f"{str(value)[:80]!r} is not a day", "write it as 2027-01-31") from None


class Gate(_Strict):
    """How verdicts become an exit code."""

    metric: dict[Literal["serve", "kernel-bench"], Metric] = {}
    margin: Share = Field(default=0.01, description="the smallest change worth a verdict")
    q: Share = Field(default=0.01, description="false discovery rate of a family")
    tolerance: Share = Field(default=0.02, description="the largest change called equivalent")
    inconclusive: Literal["warn", "fail"] = "warn"
    required: Many[Line] = Field(default=[], description="globs of cells that must come to a conclusion")
    budget: Duration | None = Field(default=None, description="bounds the run")
    tiers: dict[Line, Literal["performance", "functional"]] = Field(default={}, description="per pool/backend")
    quarantine: list[Quarantine] = []


if TYPE_CHECKING:
    AnyCell = CellSpec
else:
    _SPECS = functools.reduce(operator.or_, (kind.spec for kind in KINDS.values()))
    AnyCell = Annotated[_SPECS, Field(discriminator="kind")]


def _defaults_model() -> type[BaseModel]:
    """Any axis of any kind, each optional; the first kind that has a key gives its type."""
    fields: dict[str, Any] = {}
    for kind in KINDS.values():
        for name, info in kind.spec.model_fields.items():
            if name in ("kind", "include", "exclude") or name in fields:
                continue
            annotation: Any = info.rebuild_annotation()
            fields[name] = (annotation | None, None)
    return create_model("Defaults", __base__=_Strict, **fields)


Defaults: type[BaseModel] = _defaults_model()


class MatrixSpec(_Strict):
    """The whole file."""

    schema_: Annotated[Literal[1], BeforeValidator(lambda value: _schema(value))] = Field(alias="schema")
    name: Name
    defaults: Defaults = Field(default_factory=Defaults)  # type: ignore[valid-type]
    images: dict[Name, Image] = {}
    pools: dict[Name, Pool] = {}
    models: dict[Name, Model] = {}
    arms: dict[Name, Arm] = {}
    cells: list[AnyCell] = Field(min_length=1)
    compare: Compare | None = None
    gate: Gate = Gate()
    seed: Whole = Field(default=0, description="seeds the order of launches and every random input")


def _schema(value: Any) -> int:
    if str(value) != "1":
        raise fail(f"is {str(value)[:40]!r}", "this version reads `schema: 1`")
    return 1


def kind_keys(kind: CellKind | str) -> frozenset[str]:
    """The keys that a cell of this kind takes."""
    return frozenset(KINDS[kind].spec.model_fields)


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of matrix.yaml, for editors."""
    schema = MatrixSpec.model_json_schema(by_alias=True)
    for kind in KINDS.values():
        schema["$defs"][kind.spec.__name__]["required"] = ["kind"]  # the rest may stand in `defaults`
    axes = {axis.key for kind in KINDS.values() for axis in kind.axes} | {"arms", "required"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_or_one(schema, axes),
        "title": "moegate matrix",
    }


def _or_one(node: Any, keys: set[str]) -> Any:
    """An axis takes a list or one value, which pydantic's own schema does not say."""
    if isinstance(node, list):
        return [_or_one(item, keys) for item in node]
    if not isinstance(node, dict):
        return node
    out = {key: _or_one(value, keys) for key, value in node.items()}
    for name, schema in (out.get("properties") or {}).items():
        choices = schema.get("anyOf", [schema])
        lists = [choice for choice in choices if choice.get("type") == "array"]
        if name in keys and lists:
            plain = {key: schema.pop(key) for key in ("type", "items") if key in schema}
            schema["anyOf"] = [*([plain] if plain else choices), *(choice["items"] for choice in [plain or lists[0]])]
    return out
