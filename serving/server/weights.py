"""Weights of a decoder: seeded random numbers, or safetensors under Hugging Face names.

Both sources answer the same question ("the tensor of this name and shape"), and one builder lays the answers out as
the operators want them: query, key and value in one matrix, gate and up in one, all experts of a layer in one tensor.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from moegate import canonical
from moegate.errors import UsageError
from moegate.paths import ensure_inside
from serving.server.spec import DecoderSpec

__all__ = [
    "DecoderWeights",
    "LayerWeights",
    "MlpWeights",
    "MoeWeights",
    "Random",
    "Safetensors",
    "Source",
    "build",
    "moe_weights",
    "source_of",
]


@dataclass(frozen=True)
class MlpWeights:
    """A gated feed-forward block: `gate_up` [2I, H] (gate rows, then up rows), `down` [H, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class MoeWeights:
    """A mixture of experts: `router` [E, H] and `correction` [E] in float32, `w1` [E, 2N, H], `w2` [E, H, N]."""

    router: torch.Tensor
    correction: torch.Tensor | None
    w1: torch.Tensor
    w2: torch.Tensor
    shared: MlpWeights | None


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. `qkv` [(heads + 2 kv_heads) * head_dim, H], `out` [H, heads * head_dim]."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True)
class DecoderWeights:
    """All weights. `embed` and `head` [vocab, H]: one tensor where the model ties them."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


class Source(Protocol):
    """Where tensors come from. Names are those of a Hugging Face checkpoint, without the `model.` prefix."""

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor of this name and shape, or raise UsageError."""


class Random:
    """Normal numbers of standard deviation 1/sqrt(fan in), one seed per name: order and device count do not matter.

    Norms are ones and biases zeros. The numbers differ between device kinds, as torch's generators do.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.seed, self.dtype, self.device = seed, dtype, device

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A new tensor for `name`."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        if len(shape) == 1:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        number = int.from_bytes(hashlib.sha256(f"{self.seed}/{name}".encode()).digest()[:7], "big")
        generator = torch.Generator(device=self.device).manual_seed(number)
        # Embeddings of unit size and matrices that keep it: activations stay near one at any depth and width.
        scale = 1.0 if name == "embed_tokens.weight" else shape[-1] ** -0.5
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0.0, scale, generator=generator)


class Safetensors:
    """The `*.safetensors` files of a folder. Tensors of other parts (a vision tower) are left alone.

    Raises:
        UsageError: no files, no embedding among them, or an index that leads outside the folder.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder, self.dtype, self.device = folder, dtype, device
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for path in _shards(folder):
            try:
                handle: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UsageError(f"cannot be read: {error}", file=path) from None
            self._files[path.name] = handle
            self._where.update(dict.fromkeys(handle.keys(), path.name))
        stem = "embed_tokens.weight"
        prefixes = [name[: -len(stem)] for name in self._where if name.endswith(stem)]
        if not prefixes:
            raise UsageError(f"no tensor is named *{stem}", file=folder)
        self._prefix = min(prefixes, key=len)

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read one tensor and check its shape."""
        full = next((n for n in (self._prefix + name, name) if n in self._where), None)
        if full is None:
            raise UsageError(f"has no tensor {self._prefix}{name}", file=self.folder)
        tensor: torch.Tensor = self._files[self._where[full]].get_tensor(full)
        if tuple(tensor.shape) != shape:
            raise UsageError(f"{full} is {list(tensor.shape)}; the config wants {list(shape)}", file=self.folder)
        return tensor.to(device=self.device, dtype=self.dtype)


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        table = canonical.load_json(index).get("weight_map", {})
        names = sorted({str(name) for name in table.values()})
        paths = [ensure_inside(folder, Path(name)) for name in names]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UsageError("holds no *.safetensors", file=folder, fix="name a checkpoint folder, or `random`")
    return paths


def source_of(weights: str, seed: int, dtype: torch.dtype, device: torch.device) -> Source:
    """Where the weights come from: `random`, or a checkpoint's folder."""
    return Random(seed, dtype, device) if weights == "random" else Safetensors(Path(weights), dtype, device)


def build(spec: DecoderSpec, source: Source) -> DecoderWeights:
    """Lay out all weights of `spec` from `source`."""
    embed = source.get("embed_tokens.weight", (spec.vocab, spec.hidden))
    return DecoderWeights(
        embed=embed,
        layers=tuple(_layer(spec, source, index) for index in range(spec.layers)),
        norm=source.get("norm.weight", (spec.hidden,)),
        head=embed if spec.tied else source.get("lm_head.weight", (spec.vocab, spec.hidden)),
    )


def _layer(spec: DecoderSpec, source: Source, index: int) -> LayerWeights:
    at = f"layers.{index}."
    hidden, dim = spec.hidden, spec.head_dim
    widths = {"q": spec.heads * dim, "k": spec.kv_heads * dim, "v": spec.kv_heads * dim}
    attn = at + "self_attn."
    bias = spec.attention_bias
    qk_norm = spec.served.qk_norm
    return LayerWeights(
        input_norm=source.get(at + "input_layernorm.weight", (hidden,)),
        post_norm=source.get(at + "post_attention_layernorm.weight", (hidden,)),
        qkv=torch.cat([source.get(f"{attn}{n}_proj.weight", (w, hidden)) for n, w in widths.items()]),
        qkv_bias=torch.cat([source.get(f"{attn}{n}_proj.bias", (w,)) for n, w in widths.items()]) if bias else None,
        q_norm=source.get(attn + "q_norm.weight", (dim,)) if qk_norm else None,
        k_norm=source.get(attn + "k_norm.weight", (dim,)) if qk_norm else None,
        out=source.get(attn + "o_proj.weight", (hidden, widths["q"])),
        out_bias=source.get(attn + "o_proj.bias", (hidden,)) if bias else None,
        mlp=(
            moe_weights(spec, source, index)
            if index in spec.moe_layers
            else _mlp(source, f"{at}mlp.", hidden, spec.intermediate)
        ),
    )


def _mlp(source: Source, at: str, hidden: int, width: int) -> MlpWeights:
    gate_up = torch.cat([source.get(f"{at}{name}_proj.weight", (width, hidden)) for name in ("gate", "up")])
    return MlpWeights(gate_up, source.get(f"{at}down_proj.weight", (hidden, width)))


def moe_weights(spec: DecoderSpec, source: Source, layer: int) -> MoeWeights:
    """The weights of one layer's mixture of experts."""
    at = f"layers.{layer}."
    experts, width, hidden = spec.experts, spec.expert_width, spec.hidden
    moe, gate, up, down = spec.served.names
    block = f"{at}{moe}."
    router = source.get(block + "gate.weight", (experts, hidden))
    w1 = torch.empty((experts, 2 * width, hidden), dtype=router.dtype, device=router.device)
    w2 = torch.empty((experts, hidden, width), dtype=router.dtype, device=router.device)
    for expert in range(experts):
        name = f"{block}experts.{expert}."
        w1[expert, :width] = source.get(f"{name}{gate}.weight", (width, hidden))
        w1[expert, width:] = source.get(f"{name}{up}.weight", (width, hidden))
        w2[expert] = source.get(f"{name}{down}.weight", (hidden, width))
    correction = None
    if spec.served.correction:
        correction = source.get(block + "gate.e_score_correction_bias", (experts,)).float()
    shared = _mlp(source, block + "shared_experts.", hidden, spec.shared_width) if spec.shared_width else None
    return MoeWeights(router.float(), correction, w1, w2, shared)
