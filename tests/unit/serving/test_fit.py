"""What a server takes is known, and refused with its numbers, before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moegate.errors import UsageError
from serving.server.fit import cache_bytes, ensure_fits, ensure_length, weight_elements
from serving.server.kvcache import KvCache
from serving.server.spec import read_spec
from serving.server.weights import MlpWeights, Random, build

TINY = Path("examples/models/tiny-moe")


def test_what_a_model_takes_is_known_before_it_is_allocated() -> None:
    spec = read_spec(TINY)
    weights = build(spec, Random(1, torch.float32, torch.device("cpu")))
    held = [weights.embed, weights.norm, *([] if spec.tied else [weights.head])]
    for layer in weights.layers:
        held += [layer.input_norm, layer.post_norm, layer.qkv, layer.out]
        mlp = layer.mlp
        dense = [mlp] if isinstance(mlp, MlpWeights) else [mlp.shared] if mlp.shared else []
        held += [tensor for part in dense for tensor in (part.gate_up, part.down)]
        held += [] if isinstance(mlp, MlpWeights) else [mlp.router, mlp.w1, mlp.w2]
    assert weight_elements(spec) == sum(tensor.numel() for tensor in held)
    cache = KvCache(spec.layers, 3, 50, spec.kv_heads * spec.head_dim, torch.float32, torch.device("cpu"))
    assert cache_bytes(spec, 3, 50, 4) == cache.keys.nbytes + cache.values.nbytes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"free": 1 << 18}, "0.0 GiB may be taken"),
        ({"share": 1e-6}, "0% of 8.0 GiB may be taken"),
        ({"slots": 1 << 16}, "fewer --slots"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_with_the_numbers(options: dict, words: str) -> None:
    class Live:
        kind = "cuda"

        def memory_info(self) -> tuple[int, int]:
            return options.get("free", 8 << 30), 8 << 30

    spec = read_spec(TINY)
    asked = {"slots": options.get("slots", 4), "length": 512, "item": 4, "ep": 1, "share": options.get("share", 1.0)}
    with pytest.raises(UsageError, match="do not fit the device's memory") as caught:
        ensure_fits(spec, Live(), **asked)
    assert words in str(caught.value)
    Live.memory_info = lambda self: (80 << 30, 80 << 30)  # type: ignore[method-assign]
    ensure_fits(spec, Live(), **{**asked, "share": 1.0, "slots": 4})


def test_more_positions_than_the_model_has_are_refused() -> None:
    spec = read_spec(TINY)
    ensure_length(spec, spec.max_positions)
    with pytest.raises(UsageError, match=f"the model has {spec.max_positions}"):
        ensure_length(spec, 99_999_999)
