"""From a model's config.json to the layout of its MoE layers, without torch and without running anything of it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moegate import canonical
from moegate.configs.names import ConfigKey
from moegate.configs.values import Engine
from moegate.errors import UsageError
from moegate.families.quant import Quant, read_quant
from moegate.families.table import FAMILIES, Family
from moegate.paths import is_folder

# Where a multimodal model keeps its text model: the first of these that holds MoE fields is read, then the top level.
NESTED = ("text_config", "language_config", "llm_config")

_TORCH_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}
_MAX_LAYERS = 10_000
_MAX_SIZE = 1 << 24


@dataclass(frozen=True)
class Layout:
    """The MoE layers of one model, before any sharding.

    Args:
        architecture: as in config.json.
        experts: routed experts. topk: experts per token. intermediate: size of one expert. hidden: size of its input.
        layers: all decoder layers. moe_layers: indices of those with experts.
        shared_experts: how many shared experts the model says it has.
        fused_shared: shared experts that SGLang appends to the routed ones unless fusion is disabled.
        dtype: `bfloat16`, `float16` or `float32`. quant: storage of the experts' weights.
        nested: the section the text model sits in, empty for the top level.
        conflicts: fields that two places give differently, and which counts; what the quantisation leaves out.
    """

    architecture: str
    experts: int
    topk: int
    intermediate: int
    hidden: int
    layers: int
    moe_layers: tuple[int, ...]
    shared_experts: int
    fused_shared: int
    dtype: str
    quant: Quant
    nested: str = ""
    conflicts: tuple[str, ...] = ()

    @property
    def dense_layers(self) -> int:
        """How many layers come before the first one with experts."""
        return self.moe_layers[0]

    def key(
        self,
        device_name: str,
        *,
        tp: int = 1,
        ep: int = 1,
        dtype: str | None = None,
        fuse_shared: bool = True,
        engine: Engine = "moegate",
    ) -> ConfigKey:
        """What a config file for this model is looked up by.

        Args:
            device_name: as a driver prints it, or as in file names.
            tp: tensor-parallel size; ep: expert-parallel size, a divisor of tp.
            dtype: a dtype field (`fp8_w8a8`, `float32`, ...) or `bfloat16`/`float16` instead of the model's own.
            fuse_shared: whether the engine appends the shared expert where the family's kernels allow it.
            engine: vLLM never appends it; SGLang looks int4 weights up by their packed size.

        Raises:
            UsageError: the sizes do not divide.
        """
        intermediate, experts = self.shard(tp, ep)
        if fuse_shared and engine != "vllm":
            experts += self.fused_shared
        name, shape, channel = self.quant.dtype, self.quant.block_shape, self.quant.per_channel
        if dtype is not None:
            name = None if dtype in ("bfloat16", "float16", "bf16", "fp16", "auto") else dtype
            if name != self.quant.dtype:
                shape, channel = None, False
            if dtype == "auto":
                name, shape, channel = self.quant.dtype, self.quant.block_shape, self.quant.per_channel
        if name is None and dtype is None and self.dtype == "float32":
            name = "float32"
        if name == "int4_w4a16" and engine == "sglang":
            intermediate //= 2
        # Only vLLM's default config looks at groups along k alone; names leave them out everywhere.
        visible = shape if shape is not None and (all(shape) or engine == "vllm") else None
        return ConfigKey(experts, intermediate, device_name.strip().replace(" ", "_"), name, visible, channel)

    def shard(self, tp: int = 1, ep: int = 1) -> tuple[int, int]:
        """(intermediate size, routed experts) of one rank; UsageError where they do not divide."""
        if tp < 1 or ep < 1 or tp % ep:
            raise UsageError(f"tp {tp} is no multiple of ep {ep}", field="ep", fix="use an ep that divides tp")
        ranks = tp // ep
        if self.intermediate % ranks:
            raise UsageError(
                f"intermediate size {self.intermediate} does not divide by tp/ep = {ranks}",
                field="tp",
                fix=f"use a tp/ep among the divisors of {self.intermediate}",
            )
        if self.experts % ep:
            raise UsageError(
                f"{self.experts} experts do not divide by ep {ep}",
                field="ep",
                fix=f"use an ep among the divisors of {self.experts}",
            )
        return self.intermediate // ranks, self.experts // ep


@cache
def _table(families: tuple[Family, ...]) -> tuple[Mapping[str, Family], Mapping[str, Family]]:
    by_type = {model_type: family for family in families for model_type in family.model_types}
    return {family.architecture: family for family in families}, by_type


def config_file(path: Path) -> Path:
    """The `config.json` that a model's path means: itself, or the one in this folder. It need not exist."""
    return path / "config.json" if is_folder(path) else path


def load_layout(path: Path, *, families: tuple[Family, ...] = FAMILIES) -> Layout:
    """Read the layout from a Hugging Face `config.json` or the folder that holds one.

    Raises:
        UsageError: missing file, no JSON, unknown architecture, or a field that is missing or makes no sense.
    """
    file = config_file(path)
    return layout_of(canonical.load_json(file), file=str(file), families=families)


def layout_of(config: Any, *, file: str | None = None, families: tuple[Family, ...] = FAMILIES) -> Layout:
    """As `load_layout`, from the parsed JSON; `file` is only named in errors."""
    if not isinstance(config, dict):
        raise UsageError("a model config must be an object", file=file)
    family, nested = _family(config, file, families)
    fields = _Fields(config, nested, file, family.architecture)
    layers = fields.integer(("num_hidden_layers", "n_layers", "num_layers"), _MAX_LAYERS)
    moe_layers = _moe_layers(family, fields, layers)
    if not moe_layers:
        raise UsageError(
            "no layer has experts",
            file=file,
            field="num_hidden_layers",
            fix="check num_hidden_layers against the fields that place the MoE layers",
        )
    dtype = fields.get("torch_dtype") or fields.get("dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype.removeprefix("torch.") not in _TORCH_DTYPES:
        raise UsageError(f"is {dtype!r:.60}", file=file, field="torch_dtype", fix=f"one of {', '.join(_TORCH_DTYPES)}")
    experts = fields.integer(family.experts, 1 << 16)
    topk = fields.integer(family.topk, 1 << 16)
    if topk > experts:
        raise UsageError(f"{topk} experts per token of {experts}", file=file, field=family.topk[0])
    section = fields.section_with("quantization_config", "compression_config")
    quant, notes = read_quant(section, file, moe_layers=moe_layers, experts=experts)
    return Layout(
        architecture=family.architecture,
        experts=experts,
        topk=topk,
        intermediate=fields.integer(family.intermediate, _MAX_SIZE),
        hidden=fields.integer(family.hidden, _MAX_SIZE),
        layers=layers,
        moe_layers=moe_layers,
        shared_experts=fields.optional(family.shared, 0, 1 << 10) if family.shared else family.fused_shared,
        fused_shared=family.fused_shared,
        dtype=_TORCH_DTYPES[dtype.removeprefix("torch.")],
        quant=quant,
        nested=nested,
        conflicts=(*fields.conflicts, *notes),
    )


def _family(config: Mapping[str, Any], file: str | None, families: tuple[Family, ...]) -> tuple[Family, str]:
    by_architecture, by_type = _table(families)
    sections = [("", config)] + [(name, config[name]) for name in NESTED if isinstance(config.get(name), dict)]
    named: list[str] = []
    for _, section in sections:
        value = section.get("architectures")
        names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        named += [name for name in names if isinstance(name, str)]
    family = next((by_architecture[name] for name in named if name in by_architecture), None)
    if family is None and not named:
        types = [section.get("model_type") for _, section in sections]
        family = next((by_type[t] for t in types if isinstance(t, str) and t in by_type), None)
    if family is None:
        said = ", ".join(repr(name)[:80] for name in named)
        said = f"{said}: no MoE model that is known" if said else "no architecture that is known"
        near = difflib.get_close_matches(named[0][:200], list(by_architecture), n=3) if named else []
        raise UsageError(
            f"is {said}",
            file=file,
            field="architectures",
            fix=f"did you mean {', '.join(near)}?"
            if near
            else f"one of the {len(by_architecture)} of docs/explain.md, or add a row to moegate/families/table.py",
        )
    nested = next((name for name, section in sections[1:] if _has(section, family.experts)), "")
    return family, nested


def _has(section: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    return any(_dig(section, name) is not None for name in names)


def _dig(section: Mapping[str, Any], name: str) -> Any:
    value: Any = section
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


class _Fields:
    """Reads fields of one model config: the nested section first, then the top level; differences are noted."""

    def __init__(self, config: Mapping[str, Any], nested: str, file: str | None, architecture: str) -> None:
        self._sections = [(nested, config[nested]), ("", config)] if nested else [("", config)]
        self._file, self._architecture = file, architecture
        self.conflicts: list[str] = []

    def get(self, name: str) -> Any:
        values = [(where, value) for where, section in self._sections if (value := _dig(section, name)) is not None]
        if len(values) == 2 and values[0][1] != values[1][1]:
            (where, ours), (_, theirs) = values
            note = f"{name} is {ours!r:.40} in {where} and {theirs!r:.40} at the top: the former counts"
            if note not in self.conflicts:
                self.conflicts.append(note)
        return values[0][1] if values else None

    def section_with(self, *names: str) -> Mapping[str, Any]:
        """The first section that has one of `names`, else an empty one."""
        return next((s for _, s in self._sections if any(s.get(name) is not None for name in names)), {})

    def integer(self, names: tuple[str, ...], high: int) -> int:
        """A positive integer under the first of `names` that is there; UsageError otherwise."""
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if isinstance(value, list) and value and all(item == value[0] for item in value):
                value = value[0]
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= high:
                raise UsageError(f"is {value!r:.60}; must be an integer from 1 to {high}", file=self._file, field=name)
            return value
        raise UsageError(
            f"is missing; {self._architecture} needs it",
            file=self._file,
            field=names[0],
            fix=f"add {' or '.join(names)}" + (f" to {self._sections[0][0]}" if self._sections[0][0] else ""),
        )

    def optional(self, names: tuple[str, ...], default: int, high: int) -> int:
        """As `integer`, but missing or zero gives `default`."""
        for name in names:
            value = self.get(name)
            if value in (None, 0, False):
                continue
            return self.integer((name,), high)
        return default


def _moe_layers(family: Family, fields: _Fields, layers: int) -> tuple[int, ...]:
    """Indices of the layers with experts, by the family's rule."""
    if family.placement == "first-dense":
        dense = fields.optional(("first_k_dense_replace", "num_dense_layers"), 0, _MAX_LAYERS)
        step = (
            fields.optional(("moe_layer_freq",), 1, _MAX_LAYERS)
            if not isinstance(fields.get("moe_layer_freq"), list)
            else 1
        )
        return tuple(i for i in range(layers) if i >= dense and i % step == 0)
    if family.placement == "sparse-step":
        step = fields.optional(("decoder_sparse_step",), 1, _MAX_LAYERS)
        dense_only = fields.get("mlp_only_layers")
        skip = {i for i in dense_only if isinstance(i, int)} if isinstance(dense_only, list) else set()
        return tuple(i for i in range(layers) if i not in skip and (i + 1) % step == 0)
    if family.placement == "interleave":
        listed = fields.get("moe_layers")
        if isinstance(listed, list) and listed:
            return tuple(sorted({i for i in listed if isinstance(i, int) and 0 <= i < layers}))
        step = fields.optional(("interleave_moe_layer_step",), 1, _MAX_LAYERS)
        return tuple(i for i in range(layers) if (i + 1) % step == 0)
    if family.placement == "period":
        period = fields.optional(("expert_layer_period",), 1, _MAX_LAYERS)
        offset = fields.optional(("expert_layer_offset",), 0, _MAX_LAYERS)
        return tuple(i for i in range(layers) if i % period == offset % period)
    if family.placement == "frequency-list":
        pattern = fields.get("hybrid_override_pattern")
        if isinstance(pattern, str):  # one letter a layer; E marks experts
            return tuple(i for i, letter in enumerate(pattern[:layers]) if letter == "E")
        listed = fields.get("moe_layer_freq")
        if isinstance(listed, list):
            return tuple(i for i, flag in enumerate(listed[:layers]) if flag)
    return tuple(range(layers))
