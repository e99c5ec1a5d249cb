"""How engines are started, and what is read from their logs."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from moegate.errors import UsageError
from serving import engines, launch, ports
from serving.engines import Spec, foreign, sglang, vllm

MODEL = Path("examples/models/tiny-moe").resolve()
CONFIG = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}
UP = "E=8,N=64,device_name=NVIDIA_H200.json"
DOWN = "E=8,N=64,device_name=NVIDIA_H200_down.json"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for directory in ("triton_3_6_0", "triton_3_5_1"):
        folder = tmp_path / "tree" / "configs" / directory
        folder.mkdir(parents=True)
        for name in (UP, DOWN):
            warps = 4 if directory == "triton_3_6_0" else 8
            (folder / name).write_text(json.dumps({"1": CONFIG, "64": {**CONFIG, "num_warps": warps}}))
    return tmp_path / "tree"


def flags(command: engines.Command) -> dict[str, str]:
    argv = list(command.argv)
    return {a: b for a, b in zip(argv, [*argv[1:], ""], strict=True) if a.startswith("--")}


def test_unknown_engine() -> None:
    with pytest.raises(UsageError, match="moegate, sglang, vllm"):
        engines.get("trt")


@pytest.mark.parametrize(
    ("said", "names"),
    [("ModuleNotFoundError: No module named 'sglang')", True), ("No module named 'sglang.srt'", False),
     ("No module named 'sgl_kernel'", False), ("", False)],
)  # fmt: skip
def test_an_engine_that_is_not_installed_is_named(tmp_path: Path, said: str, names: bool) -> None:
    (tmp_path / "log").write_text(f"{said}\n")
    found = launch._missing(engines.get("sglang"), tmp_path / "log")
    assert (found is not None) == names
    assert found is None or str(found).startswith(f"sglang is not installed for {sys.executable} (fix: install sglang")


def test_sglang_is_told_what_the_cell_asks_for(tmp_path: Path, tree: Path) -> None:
    spec = Spec(MODEL, dtype="bfloat16", backend="triton", configs=tree, seed=7, graph="eager", slots=96, length=2048)
    command = engines.get("sglang").command(spec, tmp_path, 1234)
    said = flags(command)
    assert command.argv[1:3] == ("-m", "sglang.launch_server")
    assert said["--moe-runner-backend"] == "triton"
    assert said["--load-format"] == "dummy"
    assert (said["--host"], said["--port"], said["--random-seed"]) == ("127.0.0.1", "1234", "7")
    assert said["--cuda-graph-backend-decode"] == "disabled"
    assert (said["--max-running-requests"], said["--context-length"]) == ("96", "2048")
    assert command.env["SGLANG_MOE_CONFIG_DIR"] == str(tree)
    full = engines.get("sglang").command(Spec(MODEL, graph="full"), tmp_path, 1)
    assert "--cuda-graph-backend-decode" not in flags(full)
    assert not list((Path(full.env["SGLANG_MOE_CONFIG_DIR"]) / "configs").iterdir()), "untuned: empty, but there"


@pytest.mark.parametrize("form", ["root", "configs", "flat"])
def test_every_form_of_a_tree_reaches_sglang(tmp_path: Path, tree: Path, form: str) -> None:
    given = {"root": tree, "configs": tree / "configs", "flat": tree / "configs" / "triton_3_6_0"}[form]
    work = tmp_path / "work"
    work.mkdir()
    command = engines.get("sglang").command(Spec(MODEL, configs=given), work, 1)
    inside = Path(command.env["SGLANG_MOE_CONFIG_DIR"]) / "configs"
    assert (inside / UP).is_file() if form == "flat" else (inside / "triton_3_6_0" / UP).is_file()


def test_vllm_gets_a_flat_folder_of_the_best_triton_directory(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "_triton", lambda: "3.6.0")
    command = engines.get("vllm").command(Spec(MODEL, backend="triton", configs=tree, ep=1), tmp_path, 5)
    folder = Path(command.env["VLLM_TUNED_CONFIG_FOLDER"])
    assert [path.name for path in folder.iterdir()] == [UP]
    assert json.loads((folder / UP).read_text())["64"]["num_warps"] == 4
    said = flags(command)
    assert (said["--moe-backend"], said["--load-format"]) == ("triton", "dummy")
    assert "--enforce-eager" in said
    (tmp_path / "bare").mkdir()
    bare = engines.get("vllm").command(Spec(MODEL), tmp_path / "bare", 5)
    assert not list(Path(bare.env["VLLM_TUNED_CONFIG_FOLDER"]).iterdir())


def test_random_weights_get_a_tokenizer_with_the_models_vocabulary(tmp_path: Path) -> None:
    folder = foreign.model_dir(Spec(Path("examples/models/deepseek-ocr-2")), tmp_path)
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocab) == 129280
    assert foreign.model_dir(Spec(MODEL, weights="/w"), tmp_path) == Path("/w")


@pytest.mark.parametrize(
    ("given_away", "most"), [(None, 32768), ("21000 60999", 20999), ("1024 65535", 65535), ("nonsense", 65535)]
)
def test_a_free_port_is_none_that_the_system_or_ray_gives_away(
    given_away: str | None, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given_away is not None:
        (tmp_path / "range").write_text(given_away)
        monkeypatch.setattr(ports, "_GIVEN_AWAY", tmp_path / "range")
    else:
        first = int(ports._GIVEN_AWAY.read_text().split()[0])
        most = first - 1 if first >= 21000 else 65535  # a host that gives nearly all away leaves none to draw from
    drawn = {ports.free_port() for _ in range(20)}
    assert len(drawn) > 10, "two launches do not draw the same one"
    for port in drawn:
        assert 1024 < port <= most
        assert port not in range(10002, 20000) or most == 65535, "a worker of Ray may take it"
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))


def test_our_engine_spreads_experts_and_nothing_else(tmp_path: Path) -> None:
    assert "--ep-size=2" in engines.get("moegate").command(Spec(MODEL, tp=2, ep=2), tmp_path, 0).argv
    with pytest.raises(UsageError, match="only experts are spread"):
        engines.get("moegate").command(Spec(MODEL, tp=2), tmp_path, 0)


SGLANG_LOG = """
[2026-01-01 00:00:00] Using MoE kernel config from {root}/configs/triton_3_6_0/{up}.
[2026-01-01] Config file not found at {root}/configs/triton_3_7_1/{other}. Fallback to triton version 3.5.1 and \
use MoE kernel config from {root}/configs/triton_3_5_1/{other}. Performance might be sub-optimal!
[2026-01-01 00:00:01] Down MoE config file not found at {root}/configs/triton_3_6_0/{down}; reusing the tuned \
up-projection config without TMA. Performance might be sub-optimal.
[2026-01-01 00:00:02] Using default MoE kernel config. Performance might be sub-optimal! Config file not found at \
{root}/configs/triton_3_6_0/E=4,N=8,device_name=NVIDIA_H200.json, you can create them with https://github.com/x
[2026-01-01 00:00:03] Decode batch, #running-req: 4, #token: 9
[2026-01-01 00:00:03] Prefill batch, #new-seq: 1, #new-token: 256, #cached-token: 0
[2026-01-01 00:00:04] Decode batch, #running-req: 4, #token: 9
"""


def test_sglangs_log_becomes_proof(tree: Path) -> None:
    other = "E=8,N=64,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
    text = SGLANG_LOG.format(root=tree, up=UP, down=DOWN, other=other)
    found = sglang.lookups(text)
    assert [(item.projection, item.reason) for item in found] == [
        ("up", "exact"), ("up", "older-triton"), ("down", "up-config"), ("up", "default"),
    ]  # fmt: skip
    assert found[0].file == tree / "configs" / "triton_3_6_0" / UP
    assert found[1].file.name == other
    assert found[3].file is None
    uses = foreign.config_uses("fused_experts", found[:1], [4, 256], {4: 2, 256: 1})
    assert [(use.batch_size, use.file, use.config["num_warps"], use.calls) for use in uses] == [
        (4, f"triton_3_6_0/{UP}", 4, 2), (256, f"triton_3_6_0/{UP}", 4, 1),
    ]  # fmt: skip
    sizes = foreign.count_matches(sglang._DECODE, text) + foreign.count_matches(sglang._PREFILL, text)
    assert sizes == {4: 2, 256: 1}


def test_a_newer_directory_is_told_from_an_older() -> None:
    line = (
        f"Config file not found at /c/configs/triton_3_5_1/{UP}. Fallback to triton version 3.6.0 and use MoE kernel "
        f"config from /c/configs/triton_3_6_0/{UP}. Performance"
    )
    assert sglang.lookups(line)[0].reason == "newer-triton"


def test_vllms_log_becomes_proof() -> None:
    log = ("INFO [moe.py:1] Using configuration from /x/E=8,N=64,device_name=NVIDIA_H200.json for MoE layer.\n"
           "WARNING 01-01 [fused_moe.py:2] Using default MoE config. Performance might be sub-optimal! Config file not "
           "found at /opt/vllm/configs/E=4,N=8,device_name=NVIDIA_H200.json\n")  # fmt: skip
    found = vllm.lookups(log)
    assert [(item.file, item.reason) for item in found] == [
        (Path("/x/E=8,N=64,device_name=NVIDIA_H200.json"), "exact"), (None, "default"),
    ]  # fmt: skip


def test_vllms_log_names_what_ran_per_operator() -> None:
    log = "INFO [cuda.py:446] Using FLASH_ATTN backend.\nINFO [unquantized.py:529] Using TritonExperts MoE backend\n"
    assert vllm.functions(log, "triton") == {"fused_experts": "TritonExperts", "attention": "FLASH_ATTN"}
    assert vllm.functions("", "cpu") == {"fused_experts": "cpu"}


def test_the_probe_runs_in_an_environment_without_us(tmp_path: Path) -> None:
    import os
    import sys

    about = foreign.probe(sys.executable, ("torch",), ("version.py",), {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert about.device.kind == "cpu"
    assert about.device.identity.startswith("cpu:")
    assert about.versions["torch"]
    assert len(about.kernel_hash) == 16
