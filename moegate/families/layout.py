"""From a model's config.json to the layout of its MoE layers, without torch and without running anything of it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moegate import canonical
from moegate.configs.names import ConfigKey
from moegate.configs.values import Engine
from moegate.errors import UsageError
from moegate.families.fields import Fields, Section, dig
from moegate.families.placement import moe_layers
from moegate.families.quant import Quant, read_quant
from moegate.families.table import FAMILIES, Family
from moegate.paths import is_folder

# Where a multimodal model keeps its text model: the first of these that holds MoE fields is read, then the top level.
NESTED = ("text_config", "language_config", "llm_config")
LAYERS = ("num_hidden_layers", "n_layers", "num_layers")
"""Fields with the number of decoder layers, in order of preference."""

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
    family, fields = _family(config, file, families)
    layers = fields.integer(LAYERS, _MAX_LAYERS)
    placed = moe_layers(family.placement, fields, layers)
    if not placed:
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
    section = fields.object_with("quantization_config", "compression_config")
    quant, notes = read_quant(section, file, moe_layers=placed, experts=experts)
    return Layout(
        architecture=family.architecture,
        experts=experts,
        topk=topk,
        intermediate=fields.integer(family.intermediate, _MAX_SIZE),
        hidden=fields.integer(family.hidden, _MAX_SIZE),
        layers=layers,
        moe_layers=placed,
        shared_experts=fields.optional(family.shared, 0, 1 << 10) if family.shared else family.fused_shared,
        fused_shared=family.fused_shared,
        dtype=_TORCH_DTYPES[dtype.removeprefix("torch.")],
        quant=quant,
        nested=fields.nested,
        conflicts=(*fields.conflicts, *notes),
    )


def _family(config: Mapping[str, Any], file: str | None, families: tuple[Family, ...]) -> tuple[Family, Fields]:
    """The family of a model, and its fields."""
    sections = (("", config), *((name, config[name]) for name in NESTED if isinstance(config.get(name), dict)))
    family = _named_family(sections, file, families)
    nested = sections[1:]
    holders = tuple(section for section in nested if _has(section, family.experts))
    if not holders and not _has(sections[0], family.experts):  # so that what is missing is missed where the others are
        others = (*family.topk, *family.intermediate, *LAYERS)
        holders = tuple(section for section in nested if _has(section, others))[:1]
    return family, Fields((*holders[:1], sections[0]), holders[1:], file, family.architecture)


def _named_family(sections: tuple[Section, ...], file: str | None, families: tuple[Family, ...]) -> Family:
    """The family by the architectures of the sections, or by the model types of those before which none is named."""
    by_architecture, by_type = _table(families)
    named: list[str] = []
    for where, section in sections:
        value = section.get("architectures")
        names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        named += [name for name in names if isinstance(name, str)]
        model_type = section.get("model_type")
        family = next((by_architecture[name] for name in named if name in by_architecture), None)
        if family is None and not named and isinstance(model_type, str):
            family = by_type.get(model_type)
        if family is not None:
            if where and family.fused_shared:
                _refuse_wrapper(sections[0][1], family, file)
            return family
    raise _unknown(named, tuple(by_architecture), file)


def _refuse_wrapper(config: Mapping[str, Any], family: Family, file: str | None) -> None:
    """Refuse a model around `family` that is not in the table: engines fuse shared experts by the outer name."""
    for field in ("architectures", "model_type"):
        if config.get(field):
            raise UsageError(
                f"is {config[field]!r:.80} around {family.architecture}: whether it fuses shared experts is unknown",
                file=file,
                field=field,
                fix="add a row to moegate/families/table.py",
            )


def _unknown(named: Sequence[str], known: tuple[str, ...], file: str | None) -> UsageError:
    said = ", ".join(repr(name)[:80] for name in named)
    near = difflib.get_close_matches(named[0][:200], known, n=3) if named else []
    return UsageError(
        f"is {said}: no MoE model that is known" if said else "is no architecture that is known",
        file=file,
        field="architectures",
        fix=f"did you mean {', '.join(near)}?"
        if near
        else f"one of the {len(known)} of docs/explain.md, or add a row to moegate/families/table.py",
    )


def _has(section: Section, names: tuple[str, ...]) -> bool:
    return any(dig(section[1], name) is not None for name in names)
