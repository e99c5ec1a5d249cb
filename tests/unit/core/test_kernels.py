"""Which sources a tuned kernel consists of."""

from __future__ import annotations

import importlib
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from moegate import canonical, paths
from moegate.errors import UsageError
from moegate.kernels import LAUNCHERS, changed, code_hash, hash_of, kernel_files
from moegate.records import Provenance, read
from tuner.problem import OPS

DETAILS = "xkernels.ops._details"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of our kernels, to be changed."""
    shutil.copytree(Path(__file__).parents[3] / "kernels/xkernels", tmp_path / "xkernels")
    return tmp_path


def test_every_tuned_op_has_a_launcher_and_sources() -> None:
    assert set(LAUNCHERS) == set(OPS)
    for op in OPS:
        assert len(kernel_files(op)) >= 3
    assert kernel_files("silu_and_mul") == {}
    assert hash_of({}) == ""


@pytest.mark.parametrize("op", sorted(LAUNCHERS))
def test_whatever_a_kernel_uses_of_our_private_code_is_among_its_sources(op: str) -> None:
    """Held against the imported modules: where every function that they use was defined."""
    home = Path(__file__).parents[3] / "kernels"
    names = {f"xkernels.ops.{file.removesuffix('.py').replace('/', '.')}" for file in kernel_files(op)}
    for name in sorted(names):
        module = importlib.import_module(name)
        for value in vars(module).values():
            own = value.__name__ if isinstance(value, types.ModuleType) else _defined_in(value)
            assert not own.startswith(f"{DETAILS}.") or own in names, f"{name} uses {own}"
        assert Path(str(sys.modules[name].__file__)).is_relative_to(home)


def _defined_in(value: Any) -> str:
    return str(getattr(getattr(value, "fn", value), "__module__", None) or "")


@pytest.mark.parametrize(
    ("file", "ops"),
    [
        ("_details/moe_gemm.py", {"fused_experts"}),
        ("_details/experts.py", {"fused_experts"}),
        ("_details/quant.py", {"fused_experts"}),
        ("_details/dense_gemm.py", {"block_fp8_linear"}),
        ("linear.py", {"block_fp8_linear"}),
        ("_details/pdl.py", {"fused_experts", "store_kv_cache"}),
        ("_details/common.py", set(OPS)),
        ("_details/attention.py", {"store_kv_cache"}),
        *((f"_details/{name}.py", set()) for name in ("align", "topk", "decoder", "reduce", "expert_parallel")),
    ],
)
def test_a_change_concerns_the_kernels_that_are_made_of_it(copy: Path, file: str, ops: set[str]) -> None:
    before, code = {op: kernel_files(op, copy) for op in OPS}, code_hash(copy)
    with (copy / "xkernels/ops" / file).open("a") as stream:
        stream.write("# changed\n")
    after = {op: kernel_files(op, copy) for op in OPS}
    assert {op for op in OPS if hash_of(after[op]) != hash_of(before[op])} == ops
    assert all(changed(before[op], after[op]) == (f"{file} changed" if op in ops else "") for op in OPS)
    assert (code_hash(copy) != code) == file.startswith("_details/")


def test_an_import_that_comes_or_goes_is_seen(copy: Path) -> None:
    before = kernel_files("fused_experts", copy)
    kernel = copy / "xkernels/ops/_details/moe_gemm.py"
    (kernel.parent / "extra.py").write_text("def extra() -> None: ...\n")
    kernel.write_text(
        kernel.read_text() + "\n\ndef late() -> None:\n    from xkernels.ops._details.extra import extra\n"
    )
    after = kernel_files("fused_experts", copy)
    assert changed(before, after) == "_details/moe_gemm.py changed, _details/extra.py new"
    assert changed(after, before) == "_details/moe_gemm.py changed, _details/extra.py gone"


def test_what_cannot_be_read(copy: Path) -> None:
    assert code_hash(copy / "nowhere") is None
    assert kernel_files("fused_experts", copy / "nowhere") == {}
    (copy / "xkernels/ops/_details/moe_gemm.py").write_text("def (\n")
    with pytest.raises(UsageError, match=r"moe_gemm.py:1.*is no Python"):
        kernel_files("fused_experts", copy)


@pytest.mark.parametrize("content", [b"# coding: nonsense\n", b"x = 1\0\n", b"x = " + b"-" * 100_000 + b"1\n"])
def test_what_is_no_python_is_named(copy: Path, content: bytes) -> None:
    (copy / "xkernels/ops/_details/moe_gemm.py").write_bytes(content)
    with pytest.raises(UsageError, match=r"moe_gemm.py.*is no Python"):
        kernel_files("fused_experts", copy)


def test_only_files_are_sources(copy: Path) -> None:
    details = copy / "xkernels/ops/_details"
    before = kernel_files("fused_experts", copy), code_hash(copy)
    (details / ".#moe_gemm.py").symlink_to("somebody@host.1234:1700000000")  # an editor's lock
    (details / "folder.py").mkdir()
    assert (kernel_files("fused_experts", copy), code_hash(copy)) == before
    (details / "moe_gemm.py").unlink()
    (details / "moe_gemm.py").symlink_to("moe_gemm.py")
    found = kernel_files("fused_experts", copy)
    assert "_details/moe_gemm.py" in changed(before[0], found)
    assert code_hash(copy) != before[1]


def test_the_hash_of_all_kernels_is_that_of_their_folder(copy: Path) -> None:
    for path in copy.rglob("__pycache__"):
        shutil.rmtree(path)
    assert code_hash(copy) == canonical.tree_digest(copy / "xkernels/ops/_details")


def test_shipped_sidecars_name_the_sources_that_they_hash() -> None:
    found = [read(Provenance, path) for path in paths.config_root().rglob("*.provenance.json")]
    measured = [record for record in found if record.origin == "measured"]
    assert measured
    for record in measured:
        assert record.op == "fused_experts"
        assert record.kernel_hash == hash_of(record.kernel_files)
