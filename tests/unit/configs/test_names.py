"""Names of config files, both spellings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegate.configs import ConfigKey, DenseKey, format_dense_name, format_name, parse_name

DEVICE = st.text(
    st.characters(codec="ascii", exclude_characters=",/", exclude_categories=("Cc",)), min_size=1, max_size=40
)
KEYS = st.builds(
    ConfigKey,
    E=st.integers(1, 999),
    N=st.integers(1, 99999),
    device_name=DEVICE,
    dtype=st.sampled_from([None, "fp8_w8a8", "float32", "int4_w4a16"]),
    block_shape=st.sampled_from([None, (128, 128), (1, 32)]),
    per_channel_quant=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(KEYS, st.sampled_from(["up", "down"]))
def test_a_formatted_name_parses_back(key: ConfigKey, projection: str) -> None:
    if key.device_name.endswith(("_down", ".json")):
        return
    parsed = parse_name(format_name(key, projection))  # type: ignore[arg-type]
    assert parsed is not None
    assert parsed.key == key
    assert parsed.projection == projection


def test_the_spellings_differ_where_the_engines_do() -> None:
    key = ConfigKey(256, 128, "NVIDIA_H20", "fp8_w8a8", (128, 128))
    assert format_name(key) == "E=256,N=128,device_name=NVIDIA_H20,dtype=fp8_w8a8,block_shape=[128, 128].json"
    assert format_name(key, "down").endswith("block_shape=[128, 128]_down.json")
    assert format_name(key, "up", "vllm").endswith("block_shape=[128,128].json")
    for name, spelling in ((format_name(key), "sglang"), (format_name(key, "up", "vllm"), "vllm")):
        parsed = parse_name(name)
        assert parsed is not None
        assert (parsed.key, parsed.spelling) == (key, spelling)


def test_dense_names() -> None:
    key = DenseKey(4096, 7168, "NVIDIA_H200", "fp8_w8a8", (128, 128))
    assert format_dense_name(key) == "N=4096,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
    parsed = parse_name(format_dense_name(key))
    assert parsed is not None
    assert parsed.key == key


def test_other_kernels_files_are_recognised() -> None:
    parsed = parse_name("E=8,N=256,device_name=AMD_Instinct_MI350X,dtype=int4_w4a16,backend=flydsl.json")
    assert parsed is not None
    assert parsed.backend == "flydsl"


@pytest.mark.parametrize(
    "name",
    [
        "", "E=64.json", "E=64,N=896.json", "E=064,N=896,device_name=X.json", "E=0,N=896,device_name=X.json",
        "E=-1,N=896,device_name=X.json", "E=64,N=896,device_name=X.JSON", "E=64,N=896,device_name=X",
        "N=896,E=64,device_name=X.json", "E=64,N=896,device_name=X,dtype=.json", "E=64, N=896,device_name=X.json",
        "E=64,N=896,device_name=X,block_shape=[128].json", "E=64,N=896,device_name=X,block_shape=[128,  128].json",
        "E=64,N=896,device_name=X,per_channel_quant=False.json", "E=64,N=896,device_name=a/b.json",
        "E=64,N=896,device_name=X_down_up.json.txt", "E=64,N=896,device_name=X" + "y" * 300 + ".json",
    ],
)  # fmt: skip
def test_what_is_no_name(name: str) -> None:
    assert parse_name(name) is None
