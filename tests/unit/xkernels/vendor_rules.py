"""What names a vendor in source code: a table of rules over its syntax tree.

Only the device module may ask which vendor it runs on. A rule is about what code is, not about how a device is usually
spelt: a text that is a device's name is one wherever it stands. Docstrings and comments may say what they like, and so
may a text that merely contains such a word, a message for instance.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["RULES", "Finding", "findings"]

# Parts of torch (and of Triton) that exist for one vendor, or ask for whichever is there.
_MODULES = frozenset({"cuda", "rocm", "hip", "xpu", "mps", "npu", "mtia", "musa", "hpu", "mlu", "xla", "accelerator"})
_KINDS = "|".join(sorted(_MODULES - {"accelerator"}))
_PACKAGES = frozenset({"intel_extension_for_pytorch", "torch_npu", "torch_musa", "habana_frameworks", "pynvml", "cupy",
                       "amdsmi", "dpctl", "torch_xla"})  # fmt: skip

_DEVICE = re.compile(rf"({_KINDS})(:\d*)?")
_ARCH = re.compile(rf"({_KINDS})-\w+|gfx\w*|sm_?\d+\w*|bmg|pvc")
_TOOL = re.compile(r"(\S*/)?(nvidia|rocm|amd|xpu)-smi|/dev/(nvidia|kfd|dri)\S*|dpctl")
_VARIABLE = re.compile(r"(CUDA|HIP|ROCR|ROCM|NVIDIA|ZE|ONEAPI|SYCL|ASCEND)_[A-Z0-9_]+")
_VENDOR = re.compile(r"(nvidia|amd|intel)(\(r\))?", re.IGNORECASE)
_PROGRAM = re.compile(rf"\btorch\.({'|'.join(sorted(_MODULES))}|version\.hip)\b")
_QUESTION = re.compile(rf"is_({_KINDS})(_\w+)?|({_KINDS})Device", re.IGNORECASE)


@dataclass(frozen=True)
class Rule:
    """`sees`: whether one node of a tree breaks it."""

    name: str
    sees: Callable[[ast.AST], bool]


@dataclass(frozen=True)
class Finding:
    """A place that breaks a rule. `scope`: the function, class or name at the top of the module that it belongs to."""

    line: int
    scope: str
    rule: str
    code: str


def _text(node: ast.AST | None, pattern: re.Pattern[str]) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(pattern.fullmatch(node.value))


def _imports(node: ast.AST) -> Iterator[str]:
    """Each part of a dotted name that an import names."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        dotted = [alias.name for alias in node.names]
        dotted += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (part for name in dotted for part in name.split("."))


def _questioned(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _compared(node: ast.AST) -> Iterator[ast.AST]:
    """What something is compared with: by an operator, as a case, or as the beginning or end of a text."""
    if isinstance(node, ast.Compare):
        yield from (n for side in (node.left, *node.comparators) for n in ast.walk(side))
    if isinstance(node, ast.MatchValue):
        yield node.value
    if isinstance(node, ast.Call) and _questioned(node.func) in {"startswith", "endswith"}:
        yield from (n for argument in node.args for n in ast.walk(argument))


RULES: tuple[Rule, ...] = (
    Rule("a vendor's module or method", lambda n: isinstance(n, ast.Attribute) and n.attr in _MODULES),
    Rule("an import of a vendor's", lambda n: not (_MODULES | _PACKAGES).isdisjoint(_imports(n))),
    Rule("an import of a vendor's question", lambda n: any(_QUESTION.fullmatch(part) for part in _imports(n))),
    Rule("a vendor's question or class", lambda n: bool(_QUESTION.fullmatch(_questioned(n)))),
    Rule("a device by name", lambda n: _text(n, _DEVICE)),
    Rule("a platform or architecture by name", lambda n: _text(n, _ARCH)),
    Rule("a vendor's tool or device node", lambda n: _text(n, _TOOL)),
    Rule("a vendor's environment variable", lambda n: _text(n, _VARIABLE)),
    Rule("a comparison with a vendor", lambda n: any(_text(side, _VENDOR) for side in _compared(n))),
    Rule("a program that does any of it", lambda n: isinstance(n, ast.Constant) and isinstance(n.value, str)
         and bool(_PROGRAM.search(n.value))),
)  # fmt: skip


def findings(tree: ast.Module) -> Iterator[Finding]:
    """Every place of a module that breaks a rule, in the order of the source."""
    for statement in tree.body:
        said = {id(child.value) for child in ast.walk(statement) if isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)}  # fmt: skip
        for node in ast.walk(statement):
            for rule in RULES if id(node) not in said else ():
                if rule.sees(node):
                    yield Finding(getattr(node, "lineno", statement.lineno), _scope(statement), rule.name,
                                  ast.unparse(node)[:80])  # fmt: skip


def _scope(statement: ast.stmt) -> str:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return statement.name
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return ", ".join(target.id for target in targets if isinstance(target, ast.Name))
