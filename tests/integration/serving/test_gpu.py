"""The decoder on a real accelerator: fused operators against plain ones, graphs against eager steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from serving.server.batcher import Batcher, Request
from serving.server.decoder import Decoder, Prompt
from serving.server.experts import Experts
from serving.server.glue import TorchGlue
from serving.server.graphs import GraphedDecode
from serving.server.kvcache import KvCache
from serving.server.spec import read_spec
from serving.server.weights import Random, build
from xkernels import device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(device.live().kind == "cpu", reason="needs a GPU and its torch"),
]


def make(dtype: torch.dtype, slots: int = 6) -> Decoder:
    live = device.live()
    spec = dataclasses.replace(read_spec(Path("examples/models/tiny-moe")), dtype=str(dtype))
    where = live.torch_device()
    cache = KvCache(spec.layers, slots, 512, spec.kv_heads * spec.head_dim, dtype, where)
    experts = Experts(spec, dtype, live, "triton", None)
    assert experts.fused
    return Decoder(spec, build(spec, Random(1, dtype, where)), cache, experts)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-3), (torch.bfloat16, 4e-2)])
def test_fused_operators_give_the_plain_ones_logits(dtype: torch.dtype, limit: float) -> None:
    fused, plain = make(dtype), make(dtype)
    plain.glue, plain.few = TorchGlue(), None
    prompts = [Prompt(list(range(5, 40)), 2), Prompt([9], 0)]
    with torch.inference_mode():
        where = fused.device
        step = [torch.tensor(v, device=where) for v in ([3, 4, 0], [35, 1, -1], [2, 0, 0])]
        pairs = [
            (fused.prefill(prompts), plain.prefill(prompts)),
            (fused.decode(*step, 64)[:2], plain.decode(*step, 64)[:2]),
        ]
    for got, want in pairs:
        error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
        assert error < limit


@pytest.mark.parametrize("few", [True, False], ids=["kernels of few rows", "fused operators"])
def test_graph_and_eager_agree_bit_for_bit_and_padding_changes_nothing(few: bool) -> None:
    eager, graphed = make(torch.bfloat16), make(torch.bfloat16)
    if not few:
        eager.few = graphed.few = None
    step = GraphedDecode(graphed, device.live())
    with torch.inference_mode():
        for model in (eager, graphed):
            model.prefill([Prompt([4, 5, 6], 5), Prompt([9, 9], 0), Prompt([1], 3)])
        for rows in ([[7, 8, 9, 0], [3, 2, 1, -1], [5, 0, 3, 0]], [[11, 12, 13, 0], [4, 3, 2, -1], [5, 0, 3, 0]]):
            packed = torch.tensor(rows, device=eager.device)
            want = eager.decode(packed[0], packed[1], packed[2], step.span([5]))[:3]
            got = step(*(row[:3] for row in rows))
            assert torch.equal(got, want)
        assert torch.equal(eager.cache.keys[:, 1:], graphed.cache.keys[:, 1:])
        assert next(iter(step._captured.values())).graph is not None, "a real graph ran"


def test_whole_answers_are_the_same_with_graphs() -> None:
    answers = []
    for graphs in (False, True):
        model = make(torch.float32)
        batcher = Batcher(model, 64, GraphedDecode(model, device.live()) if graphs else None)
        found: dict[int, list[int]] = {}
        with torch.inference_mode():
            for index in range(9):
                batcher.add(Request(index, [index + 2, 40 + index], 20 + index, ignore_eos=True))
            while batcher.busy:
                for token in batcher.step():
                    found.setdefault(token.id, []).append(token.token)
        answers.append(found)
    assert answers[0] == answers[1]
