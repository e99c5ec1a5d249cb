"""Nothing outside `xkernels.device` branches on a vendor, and no device is named by a literal in library code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("kernels/xkernels", "tuner", "serving")
VENDOR_MODULES = {"cuda", "xpu", "hip", "mps", "npu"}
DEVICE_WORDS = ("cuda", "xpu", "hip", "mps", "npu")


def sources() -> list[Path]:
    found = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]
    return [p for p in found if "device" not in p.relative_to(ROOT).parts[2:3]]


def findings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        # torch.cuda.anything, torch.version.hip
        if isinstance(node, ast.Attribute) and node.attr in VENDOR_MODULES and ast.unparse(node.value) == "torch":
            yield node.lineno, f"torch.{node.attr}"
        if (
            isinstance(node, ast.Attribute)
            and node.attr in VENDOR_MODULES
            and ast.unparse(node.value) == "torch.version"
        ):
            yield node.lineno, f"torch.version.{node.attr}"
        # device="cuda", torch.device("cuda:0"), .to("cuda")
        if isinstance(node, ast.keyword) and node.arg == "device" and _names_a_device(node.value):
            yield node.value.lineno, f"device={ast.unparse(node.value)}"
        if (
            isinstance(node, ast.Call)
            and _called(node) in {"device", "to"}
            and node.args
            and _names_a_device(node.args[0])
        ):
            yield node.lineno, ast.unparse(node)
        # x.is_cuda, x.device.type == "cuda"
        if isinstance(node, ast.Attribute) and node.attr in {"is_cuda", "is_xpu", "is_hip"}:
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Compare) and any(_names_a_device(side) for side in [node.left, *node.comparators]):
            sides = " ".join(ast.unparse(side) for side in [node.left, *node.comparators])
            if "device" in sides and ".type" in sides:
                yield node.lineno, ast.unparse(node)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _names_a_device(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] in DEVICE_WORDS


def test_there_is_something_to_look_at() -> None:
    assert len(sources()) > 20


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_vendor_outside_the_device_module(path: Path) -> None:
    found = list(findings(ast.parse(path.read_text(encoding="utf-8"))))
    assert not found, f"{path}: ask xkernels.device instead: {found}"


@pytest.mark.parametrize(
    "code",
    ["torch.cuda.synchronize()", "x = torch.empty(1, device='cuda')", "x.to('xpu:0')", "torch.device('cuda', 0)",
     "if torch.version.hip: pass", "if x.is_cuda: pass", "if x.device.type == 'xpu': pass"],
)  # fmt: skip
def test_the_rule_finds_what_it_forbids(code: str) -> None:
    assert list(findings(ast.parse(code)))
