"""What every family makes of one probe config: the part of a family that a lock file can hold.

The probe has every field that any family reads, each with a value of its own, so that reading another field, counting
one expert more or placing one layer differently changes the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegate.families.layout import layout_of
from moegate.families.table import FAMILIES, Family

PROBE: Mapping[str, Any] = {
    "num_experts": 16,
    "num_local_experts": 24,
    "n_routed_experts": 32,
    "ffn_config": {"moe_num_experts": 40, "moe_top_k": 5, "ffn_hidden_size": 80},
    "num_experts_per_tok": 2,
    "top_k_experts": 3,
    "intermediate_size": 64,
    "moe_intermediate_size": 96,
    "expert_hidden_dim": 112,
    "hidden_size": 128,
    "d_model": 144,
    "moe_latent_size": 160,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 2,
    "n_shared_experts": 2,
    "num_shared_experts": 3,
    "decoder_sparse_step": 2,
    "interleave_moe_layer_step": 3,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "hybrid_override_pattern": "ME*E-E",
    "torch_dtype": "bfloat16",
}


def answers(families: tuple[Family, ...] = FAMILIES) -> dict[str, str]:
    """Architecture -> what the probe means to it, as one line of text."""
    return {family.architecture: _answer(family, families) for family in families}


def _answer(family: Family, families: tuple[Family, ...]) -> str:
    layout = layout_of({"architectures": [family.architecture], **PROBE}, families=families)
    served = layout.key("probe", engine="sglang")
    plain = layout.key("probe", engine="sglang", fuse_shared=False)
    layers = ",".join(map(str, layout.moe_layers))
    return (
        f"E {served.E} (unfused {plain.E}) topk {layout.topk} N {served.N} hidden {layout.hidden} "
        f"layers {layout.layers} with experts {layers} shared {layout.shared_experts}"
    )
