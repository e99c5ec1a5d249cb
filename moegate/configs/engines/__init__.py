"""Each engine's lookup, answered without the engine: what its released code does with a tree, quirks included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moegate.configs.engines import moegate as _moegate
from moegate.configs.engines import sglang as _sglang
from moegate.configs.engines import vllm as _vllm
from moegate.configs.engines.raised import EngineRaises
from moegate.configs.names import ConfigKey, Projection, Spelling
from moegate.configs.tree import ConfigTree, Pair, Resolution
from moegate.configs.values import Engine
from moegate.errors import UsageError

__all__ = ["ENGINES", "EngineLookup", "EngineRaises", "engine_of", "resolve", "resolve_pair", "resolver"]

Lookup = Callable[[Path | None, ConfigKey, Projection, str], Resolution]


@dataclass(frozen=True)
class EngineLookup:
    """One engine: how it spells names, what its callers can put into them, and its lookup.

    Args:
        version: the release that is emulated.
        dtypes: dtype fields that its callers can form, each with whether block scales may (`optional`), must
            (`required`) or cannot (`never`) come with it.
        per_channel: dtype fields that can carry `per_channel_quant=True`; those of `channel_only` always do, unless
            they have block scales.
        over_group: what BLOCK_SIZE_K above the group of scales means: `wrong` results, or `clamped` at launch.
        down_files: whether it reads `_down` files.
        fallback: whether it searches other Triton directories.
    """

    name: Engine
    version: str
    spelling: Spelling
    lookup: Lookup
    dtypes: Mapping[str | None, Literal["optional", "required", "never"]]
    per_channel: frozenset[str] = frozenset()
    channel_only: frozenset[str] = frozenset()
    over_group: Literal["wrong", "clamped"] = "wrong"
    down_files: bool = True
    fallback: bool = True

    def why_unreachable(self, key: ConfigKey) -> str | None:
        """Why no caller of this engine can form `key`, device aside; None where one can."""
        if key.dtype not in self.dtypes:
            return f"{self.name} never asks for dtype={key.dtype}"
        blocks = self.dtypes[key.dtype]
        said = f"dtype={key.dtype}" if key.dtype else "no dtype field"
        if key.block_shape is not None and not all(key.block_shape):
            return f"{self.name} leaves out a block_shape with a zero"
        if key.block_shape is not None and blocks == "never":
            return f"{self.name} never asks for a block_shape with {said}"
        if key.per_channel_quant and (key.dtype not in self.per_channel or key.block_shape is not None):
            return f"{self.name} never asks for per_channel_quant with {said}"
        if key.block_shape is None and not key.per_channel_quant and key.dtype in self.channel_only:
            return f"{self.name} asks for {said} with per_channel_quant=True or a block_shape only"
        return None


_SGLANG_DTYPES: Mapping[str | None, Literal["optional", "required", "never"]] = {
    None: "never",
    "float32": "never",
    "fp8_w8a8": "optional",
    "int8_w8a8": "optional",
    "int4_w4a16": "never",
    "int8_w8a16": "never",
}

ENGINES: Mapping[str, EngineLookup] = {
    "moegate": EngineLookup(
        "moegate", "0.1", "sglang", _moegate.lookup,
        {**_SGLANG_DTYPES, "mxfp4_w4a16": "optional"}, frozenset({"fp8_w8a8", "int8_w8a8"}),
    ),
    "sglang": EngineLookup(
        "sglang", "0.5.23", "sglang", _sglang.lookup, _SGLANG_DTYPES,
        frozenset({"fp8_w8a8", "int8_w8a8"}), frozenset({"int8_w8a8"}),
    ),
    "vllm": EngineLookup(
        "vllm", "0.32.0", "vllm", _vllm.lookup,
        {None: "optional", "float32": "never", "fp8_w8a8": "optional", "fp8_w8a16": "optional",
         "int8_w8a16": "optional", "int4_w4a16": "optional"},
        over_group="clamped", down_files=False, fallback=False,
    ),
}  # fmt: skip


def engine_of(name: str) -> EngineLookup:
    """The engine called `name`; UsageError where there is none."""
    if name not in ENGINES:
        raise UsageError(f"unknown engine {name!r:.60}", field="engine", fix=f"one of {', '.join(ENGINES)}")
    return ENGINES[name]


def resolve(
    engine: str, root: Path | None, key: ConfigKey, projection: Projection = "up", *, triton: str
) -> Resolution:
    """What `engine` loads for one projection from `root` (None: an empty tree).

    Raises:
        EngineRaises: the engine itself would fail here, with its exception's name.
        UsageError: the tree or a file in it cannot be read by us.
    """
    return engine_of(engine).lookup(root, key, projection, triton)


def resolve_pair(engine: str, root: Path | None, key: ConfigKey, *, triton: str) -> Pair:
    """Both projections as `engine` loads them; see `resolve`."""
    lookup = engine_of(engine).lookup
    return Pair(lookup(root, key, "up", triton), lookup(root, key, "down", triton))


def resolver(engine: str, root: Path | None) -> Callable[[ConfigKey, Projection, str], Resolution]:
    """A lookup in one tree for many keys: moegate's lists the tree once, the others read it as their engine does."""
    if engine == "moegate":
        tree = ConfigTree(root)
        return lambda key, projection, triton: tree.resolve(key, projection, triton=triton)
    lookup = engine_of(engine).lookup
    return lambda key, projection, triton: lookup(root, key, projection, triton)
