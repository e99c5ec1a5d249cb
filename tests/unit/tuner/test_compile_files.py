"""Which config files `tuner compile` compiles, for what and with which kernel, and what it says of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuner.commands.compile import run as compile_configs

TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
FP8 = "dtype=fp8_w8a8,block_shape=[128, 128]"


def compiled(folder: Path, targets: str, code: int) -> list[dict[str, Any]]:
    """The rows of a folder's files."""
    out = folder / "facts" / "facts.json"
    out.parent.mkdir()
    assert compile_configs(targets=targets, configs=folder, out=out) == code
    rows: list[dict[str, Any]] = json.loads(out.read_text())["facts"]
    return rows


def test_compile_has_a_row_for_what_nothing_can_be_launched_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "E=8,N=64,device_name=NVIDIA_H200.json"
    lacking = {key: value for key, value in TILE.items() if key != "BLOCK_SIZE_N"}
    content = {"triton_version": "3.8.0", "x": {}, "1": lacking, "2": {**TILE, "num_warps": 3}, "4": 7}
    path.write_text(json.dumps(content, indent=1))
    rows = compiled(tmp_path, "sm_90", 1)
    assert {row["status"] for row in rows} == {"failed"}
    assert [(row["batch_size"], row["field"], row["error"].split(";")[0]) for row in rows] == [
        (None, "x", "key 'x' is no batch size"),
        (1, "1", "batch size 1 has no BLOCK_SIZE_N: nothing can be launched"),
        (2, "2.num_warps", "num_warps at batch size 2 is 3"),
        (4, "4", "batch size 4 is 7"),
    ]
    lines = path.read_text().splitlines()
    named = ['"x"', '"1"', '"num_warps": 3', '"4"']
    assert all(word in lines[row["line"] - 1] for word, row in zip(named, rows, strict=True))
    assert f"  {path}:{rows[2]['line']}, M=2 for sm_90: num_warps at batch size 2 is 3" in capsys.readouterr().out


def test_a_damaged_file_is_a_row_and_the_others_are_compiled(tmp_path: Path) -> None:
    contents = ["[1]", "{}", "", "3", '{"1": {},\n"1": {}}', "\udcff", json.dumps({"1": TILE})]
    lines = {2: 1, 3: 1, 4: 1, 5: 1, 6: 2, 7: None}  # by the E of their names
    for count, content in enumerate(contents, 2):
        path = tmp_path / f"E={count},N=64,device_name=NVIDIA_H200.json"
        path.write_text(content, errors="surrogateescape")
    *bad, good = sorted(compiled(tmp_path, "sm_90", 1), key=lambda row: row["file"])
    assert (good["file"], good["status"]) == (str(path), "ok")
    assert [Path(row["file"]).name.split(",")[0] for row in bad] == [f"E={count}" for count in lines]
    assert {row["status"] for row in bad} == {"failed"}
    assert [row["line"] for row in bad] == list(lines.values())
    assert all(row["error"] for row in bad)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("E=8,N=64,device_name=Intel(R)_Arc(TM)_Pro_B60_Graphics", "of target bmg, which is not among sm_90"),
        ("E=8,N=64,device_name=NVIDIA_GeForce_RTX_4090", "of target sm_89"),
        ("E=8,N=64,device_name=NVIDIA_H900", "no device called 'NVIDIA_H900'"),
        ("E=8,N=64,device_name=AMD_Radeon_Graphics", "no device called"),  # many different devices share that name
        ("E=8,N=64,device_name=NVIDIA_H200,dtype=int4_w4a16", "no kernel for dtype int4_w4a16"),
        ("E=8,N=64,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[1, 128]", "no kernel for dtype fp8_w8a8 [1, "),
        ("E=8,N=64,device_name=NVIDIA_H200,block_shape=[128, 128]", "no kernel for dtype None [128, 128]"),
        (f"E=8,N=64,device_name=NVIDIA_H200,{FP8},per_channel_quant=True", "[128, 128] per channel"),
        (f"N=512,K=512,device_name=NVIDIA_H200,{FP8.replace('fp8', 'int8')}", "no kernel for a dense layer of dtype i"),
        ("N=512,K=512,device_name=NVIDIA_H200,dtype=fp8_w8a8", "no kernel for a dense layer of dtype fp8_w8a8"),
        ("E=8,N=64,device_name=NVIDIA_H200,backend=flydsl", "for a kernel of flydsl"),
    ],
)
def test_a_file_that_is_not_compiled_says_why(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"1": TILE}))
    (row,) = compiled(tmp_path, "sm_90,, sm_90", 0)  # a target that is named twice is one
    assert row["status"] == "skipped"
    assert words in row["error"]
    head, reason = capsys.readouterr().out.splitlines()
    assert head == "entries of config files for sm_90: 1 skipped; nothing was compiled"
    assert reason == f"  1 skipped: {row['error']}"


@pytest.mark.slow
def test_a_file_is_compiled_with_the_kernel_of_its_scheme(tmp_path: Path) -> None:
    kernels = {
        "E=8,N=64,device_name=NVIDIA_H200,dtype=mxfp4_w4a16.json": "up_gemm",
        "E=8,N=64,device_name=NVIDIA_H200,dtype=mxfp4_w4a16,block_shape=[1, 32]_down.json": "down_gemm",
        "E=8,N=64,device_name=NVIDIA_H200,dtype=fp8_w8a8,per_channel_quant=True.json": "up_gemm",
        f"N=256,K=384,device_name=NVIDIA_H200,{FP8}.json": "fp8_gemm",
    }
    for name in kernels:
        (tmp_path / name).write_text(json.dumps({"16": {**TILE, "BLOCK_SIZE_K": 128}}))
    rows = compiled(tmp_path, "gfx942,sm_90", 0)
    assert {Path(row["file"]).name: row["kernel"] for row in rows} == kernels
    assert {(row["status"], row["target"]) for row in rows} == {("ok", "sm_90")}
