"""100,000 mutated names, config files and model configs: findings or clean errors, quickly, and never a traceback."""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moegate import canonical
from moegate.configs import parse_name
from moegate.configs.engines import ENGINES
from moegate.errors import UsageError
from moegate.families import layout_of
from orchestrator.check.files import check_bytes, check_file
from orchestrator.check.trees import Entry

NAMES, BODIES, MODELS = 60_000, 20_000, 20_000

NAME_SEEDS = (
    "E=64,N=896,device_name=Intel(R)_Arc(TM)_Pro_B60_Graphics_down.json",
    "E=256,N=128,device_name=NVIDIA_H20,dtype=fp8_w8a8,block_shape=[128, 128],per_channel_quant=True_down.json",
    "N=4096,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json",
)
ENTRY = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
BODY_SEEDS = (
    json.dumps({"1": ENTRY, "16": {**ENTRY, "USE_TMA": True}, "4096": ENTRY}, indent=2),
    json.dumps({"triton_version": "3.4.0", "1": {**ENTRY, "SPLIT_K": 1, "kpack": 2}}),
)
OCR = {
    "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 896, "hidden_size": 1280,
    "num_hidden_layers": 12, "first_k_dense_replace": 1, "n_shared_experts": 2,
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 2048,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
CHANNEL = {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_latent_size": 32,
    "moe_intermediate_size": 64, "num_hidden_layers": 4, "hybrid_override_pattern": "ME*E",
    "quantization_config": {"config_groups": CHANNEL},
}  # fmt: skip
NESTED = {"architectures": ["DeepseekOCR2ForCausalLM"], "language_config": OCR}
MODEL_SEEDS = tuple(json.dumps(model) for model in (NESTED, QWEN, NEMOTRON))
TOKENS = (
    "null", "NaN", "-Infinity", "1e999", "-1", "0", "1" * 60, "1" * 5000, '""', "[]", "{}", "true", '"x"', "\x00",
    "\ud800", "\u0661", "[" * 3000, '{"a":' * 3000, "\\", '"', ",", ":", "=", "..", "/",
    "_down", ".json", " ", "\n", "\t", "é",
)  # fmt: skip


def mutate(text: str, rng: random.Random) -> str:
    """A few random edits: cut, repeat, swap in a token, flip a character."""
    for _ in range(rng.randint(1, 5)):
        at, end = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        kind = rng.randrange(4)
        if kind == 0:
            text = text[:at] + text[min(end, at + 12) :]
        elif kind == 1:
            text = text[:end] + text[at : min(end, at + 40)] + text[end:]
        elif kind == 2:
            text = text[:at] + rng.choice(TOKENS) + text[min(end, at + 6) :]
        else:
            text = text[:at] + chr(rng.randrange(32, 0x250)) + text[at + 1 :]
    return text[:20_000]


def timed(items: Iterator[Callable[[], object]]) -> float:
    """Run all; the longest time that one took."""
    longest = 0.0
    for run in items:
        start = time.process_time()
        run()
        longest = max(longest, time.process_time() - start)
    return longest


def names(rng: random.Random, folder: Path) -> Iterator[Callable[[], object]]:
    for _ in range(NAMES):
        text = mutate(rng.choice(NAME_SEEDS), rng)
        yield lambda text=text: parse_name(text)


def bodies(rng: random.Random, folder: Path) -> Iterator[Callable[[], object]]:
    names_ = [n for n in NAME_SEEDS if parse_name(n)]
    engines = list(ENGINES.values())
    for number in range(BODIES):
        name = rng.choice(names_)
        content = mutate(rng.choice(BODY_SEEDS), rng).encode("utf-8", "surrogatepass")
        entry, engine = Entry("file", folder / name, "", name), engines[number % 3]
        yield lambda entry=entry, engine=engine, content=content: check_bytes(entry, "f", engine, content)


def models(rng: random.Random, folder: Path) -> Iterator[Callable[[], object]]:
    def read(text: str) -> object:
        try:
            layout = layout_of(canonical.loads_json(text, file="config.json"), file="config.json")
            return layout.key("X", tp=2, engine="sglang")
        except UsageError as error:
            return str(error)

    for _ in range(MODELS):
        text = mutate(rng.choice(MODEL_SEEDS), rng)
        yield lambda text=text: read(text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [names, bodies, models])
def test_mutations(kind: Callable[[random.Random, Path], Iterator[Callable[[], object]]], tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert timed(kind(random.Random(11), tmp_path)) < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_there_are_a_hundred_thousand() -> None:
    assert NAMES + BODIES + MODELS == 100_000


@pytest.mark.parametrize("value", ["1e999", "1" * 60, '"\\ud800"', "[[[[1]]]]", "{}", "true"])
def test_odd_but_valid_values(value: str, tmp_path: Path) -> None:
    entry = Entry("file", tmp_path / NAME_SEEDS[0], "", NAME_SEEDS[0])
    text = BODY_SEEDS[0].replace('"BLOCK_SIZE_N": 64', f'"BLOCK_SIZE_N": {value}', 1)
    text = text.replace('"16"', f'"{"9" * 5000}"')
    _, found = check_bytes(entry, "f", ENGINES["sglang"], text.encode())
    assert {item.rule for item in found} == {"bad-value"}


def test_a_file_that_is_no_text_or_far_too_big_is_a_finding(tmp_path: Path) -> None:
    name = NAME_SEEDS[0]
    for content in (b"\xff\xfe\x00", b"\x00" * 100, b"[" * (5 << 20)):
        (tmp_path / name).write_bytes(content)
        _, found = check_file(Entry("file", tmp_path / name, "", name), "f", ENGINES["sglang"])
        assert [item.rule for item in found] == ["bad-value"]
