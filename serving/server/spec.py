"""What a decoder looks like, read from a Hugging Face `config.json` (data only, never executed).

`moegate.families` says what the MoE layers are; this page adds what a decoder needs besides them. One table says what
differs between the families that this server runs. What it cannot do (multi-head latent attention, sliding windows,
scaled rotary embeddings, quantised checkpoints) is refused by name: a model that is served slightly wrong is worse
than one that is not served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moegate import canonical
from moegate.errors import UsageError
from moegate.families import Layout, config_file, layout_of

__all__ = ["SERVED", "DecoderSpec", "Served", "read_spec", "spec_from"]


@dataclass(frozen=True)
class Served:
    """A family that this server runs, and what it does differently.

    `names` are the blocks of a checkpoint: the MoE block and an expert's gate, up and down matrix. `renormalise` None
    means that the config's `norm_topk_prob` decides. `correction` is a bias that moves the choice of experts and never
    their weights. `grouped` families read `n_group`, `routed_scaling_factor` and shared experts.
    """

    architectures: frozenset[str]
    names: tuple[str, str, str, str] = ("mlp", "gate_proj", "up_proj", "down_proj")
    renormalise: bool | None = None
    qk_norm: bool = False
    correction: bool = False
    grouped: bool = False
    rms_eps: float = 1e-6
    rope_theta: float = 1e4


SERVED: tuple[Served, ...] = (
    Served(
        frozenset(
            {"DeepseekForCausalLM", "DeepseekV2ForCausalLM", "DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM"}
        ),
        grouped=True,
    ),
    Served(frozenset({"DeepseekV3ForCausalLM"}), correction=True, grouped=True),
    Served(
        frozenset({"MixtralForCausalLM"}),
        names=("block_sparse_moe", "w1", "w3", "w2"),
        renormalise=True,
        rms_eps=1e-5,
        rope_theta=1e6,
    ),
    Served(frozenset({"Qwen3MoeForCausalLM"}), qk_norm=True),
)


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder's dimensions and rules.

    `shared_width` is the width of all shared experts together (0: none). `groups`/`top_groups` limit the choice of
    experts to the best groups (1/1: no limit). `eos` are the ids that end an answer. `dtype` is the config's.
    """

    served: Served
    layout: Layout
    vocab: int
    hidden: int
    layers: int
    moe_layers: frozenset[int]
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: int
    topk: int
    expert_width: int
    shared_width: int
    max_positions: int
    rms_eps: float
    rope_theta: float
    scoring: Literal["softmax", "sigmoid"]
    renormalise: bool
    groups: int
    top_groups: int
    routed_scaling: float
    attention_bias: bool
    tied: bool
    eos: tuple[int, ...]
    dtype: str


def read_spec(path: Path) -> DecoderSpec:
    """Read the decoder of a model folder or of a `config.json`.

    Raises:
        UsageError: no such file, an unknown family, a missing or impossible field, or something this server cannot do.
    """
    file = config_file(path)
    return spec_from(canonical.load_json(file), file)


def spec_from(config: Any, file: Path | None = None) -> DecoderSpec:
    """Build the spec from a parsed config; `file` is only named in errors."""
    layout = layout_of(config, file=None if file is None else str(file))
    reader = _Reader(config[layout.nested] if layout.nested else config, config, file)
    served = _served(reader, layout)
    _refuse_unsupported(reader, layout)
    heads = reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.error("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
    grouped = served.grouped and _chooses_groups(reader, served)
    groups = reader.integer("n_group", 1) if grouped else 1
    top_groups = reader.integer("topk_group", 1) if grouped else 1
    if layout.experts % groups or layout.topk > layout.experts // groups * top_groups:
        raise reader.error("n_group", f"the best {top_groups} of {groups} groups do not hold {layout.topk} experts")
    return DecoderSpec(
        served=served,
        layout=layout,
        vocab=reader.integer("vocab_size"),
        hidden=layout.hidden,
        layers=layout.layers,
        moe_layers=frozenset(layout.moe_layers),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(reader, layout.hidden, heads),
        intermediate=reader.integer("intermediate_size"),
        experts=layout.experts,
        topk=layout.topk,
        expert_width=layout.intermediate,
        shared_width=layout.shared_experts * layout.intermediate if served.grouped else 0,
        max_positions=reader.integer("max_position_embeddings", 2048),
        rms_eps=reader.number("rms_norm_eps", served.rms_eps),
        rope_theta=_rope_theta(reader, served),
        scoring=_scoring(reader, served),
        renormalise=reader.flag("norm_topk_prob", False) if served.renormalise is None else served.renormalise,
        groups=groups,
        top_groups=top_groups,
        routed_scaling=reader.number("routed_scaling_factor", 1.0) if served.grouped else 1.0,
        attention_bias=reader.flag("attention_bias", False),
        tied=reader.flag("tie_word_embeddings", False),
        eos=_eos(reader),
        dtype=layout.dtype,
    )


_MOST = 1e30  # float32 holds it; no constant of a model comes near


class _Reader:
    """Typed access to one config object with errors that name file and field."""

    def __init__(self, text: Mapping[str, Any], outer: Mapping[str, Any], file: Path | None) -> None:
        self.text, self.outer, self.file = text, outer, file

    def error(self, field: str, message: str, fix: str | None = None) -> UsageError:
        return UsageError(message, file=self.file, field=field, fix=fix)

    def get(self, field: str) -> Any:
        return self.text.get(field)

    def integer(self, field: str, default: int | None = None) -> int:
        value = self.get(field)
        if value is None:
            if default is None:
                raise self.error(field, "is missing")
            return default
        low = 0 if default == 0 else 1
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 1 << 31:
            raise self.error(field, f"is {value!r}; must be an integer of at least {low}")
        return value

    def number(self, field: str, default: float) -> float:
        value = self.get(field)
        return default if value is None else self.positive(field, value)

    def positive(self, field: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
            raise self.error(field, f"is {value!r}; must be a positive number")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, f"is {value!r}; must be true or false")
        return value


def _served(reader: _Reader, layout: Layout) -> Served:
    served = next((row for row in SERVED if layout.architecture in row.architectures), None)
    if served is None:
        known = ", ".join(sorted(name for row in SERVED for name in row.architectures))
        raise reader.error("architectures", f"{layout.architecture} is not served by this engine", f"one of {known}")
    return served


def _refuse_unsupported(reader: _Reader, layout: Layout) -> None:
    """Refuse what would be served wrongly."""
    other = "use --engine sglang or vllm"
    latent = reader.get("kv_lora_rank")
    if reader.get("use_mla") is True or (latent and reader.get("use_mla") is None):
        raise reader.error("kv_lora_rank", "multi-head latent attention is not served", other)
    scaling = reader.get("rope_scaling") or reader.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else scaling
    if kind != "default":
        raise reader.error("rope_scaling", f"{kind!r} rotary scaling is not served", other)
    if reader.get("sliding_window") and reader.get("use_sliding_window") is not False:
        raise reader.error("sliding_window", "sliding-window attention is not served", other)
    if (reader.get("hidden_act") or "silu") != "silu":
        raise reader.error("hidden_act", f"{reader.get('hidden_act')!r} is not served", "silu")
    if layout.quant.method != "none":
        raise reader.error("quantization_config", f"{layout.quant.method} checkpoints are not served", other)


def _chooses_groups(reader: _Reader, served: Served) -> bool:
    """Whether experts are chosen within the best groups: `greedy` passes groups over, whatever `n_group` says."""
    known = {"greedy": False, "gready": False, "group_limited_greedy": True, "noaux_tc": True}
    method = reader.get("topk_method") or ("noaux_tc" if served.correction else "greedy")
    if not isinstance(method, str) or method not in known or (method == "noaux_tc") != served.correction:
        raise reader.error("topk_method", f"is {method!r}", "noaux_tc" if served.correction else "greedy")
    return known[method]


def _head_dim(reader: _Reader, hidden: int, heads: int) -> int:
    head_dim = reader.integer("head_dim", hidden // heads)
    if head_dim % 2 or (reader.get("head_dim") is None and hidden % heads):
        raise reader.error("head_dim", f"{hidden} over {heads} heads gives no even head width")
    return head_dim


def _rope_theta(reader: _Reader, served: Served) -> float:
    nested = reader.get("rope_parameters")
    if isinstance(nested, dict) and nested.get("rope_theta"):
        return reader.positive("rope_parameters.rope_theta", nested["rope_theta"])
    return reader.number("rope_theta", served.rope_theta)


def _scoring(reader: _Reader, served: Served) -> Literal["softmax", "sigmoid"]:
    value = reader.get("scoring_func") or ("sigmoid" if served.correction else "softmax")
    if value == "softmax" and not served.correction:
        return "softmax"
    if value == "sigmoid":
        return "sigmoid"
    raise reader.error("scoring_func", f"is {value!r}", "softmax or sigmoid")


def _eos(reader: _Reader) -> tuple[int, ...]:
    value = reader.get("eos_token_id")
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in found):
        raise reader.error("eos_token_id", f"is {value!r}; must be token ids")
    return tuple(found)
