"""Which sources our kernels consist of, read from the files: nothing is imported, and no torch is needed.

A tuned config belongs to the kernel that it was timed on, so its hash covers the files which that op's kernel is
compiled from, and no others: a change to attention leaves the experts' configs alone. Which code a launch ran is
another question, answered by the hash over all kernels.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from moegate import canonical
from moegate.errors import UsageError

__all__ = ["LAUNCHERS", "changed", "code_hash", "hash_of", "kernel_files"]

_NAMED = 6  # files of a kind that are named
_PACKAGE, _OPS, _PRIVATE = "xkernels", "xkernels.ops", "xkernels.ops._details"

LAUNCHERS: Mapping[str, str] = {
    "fused_experts": "xkernels.ops._details.experts",
    "block_fp8_linear": "xkernels.ops.linear",
    "store_kv_cache": "xkernels.ops.kv_cache",
}
"""The module of each tuned op that turns a config into a launch: where its sources are followed from."""


def kernel_files(op: str, packages: Path | None = None) -> dict[str, str]:
    """The sources of the kernel that `op` tunes: file below `xkernels/ops` -> sha256 (hex); empty where unknown here.

    Those are the module that launches it and what that imports from `xkernels.ops._details`, transitively. Public ops
    that the launcher calls (sorting, the sum over slots) are kernels of their own, launched around the tuned one.

    Args:
        packages: the folder that holds `xkernels`; None is the installed one.

    Raises:
        UsageError: a file is no Python, or cannot be read.
    """
    home = packages if packages is not None else _installed()
    first = LAUNCHERS.get(op)
    if home is None or first is None:
        return {}
    found: dict[str, str] = {}
    waiting, seen = [first], {first}
    while waiting:
        path = home.joinpath(*waiting.pop().split(".")).with_suffix(".py")
        if not path.is_file():
            continue
        found[path.relative_to(home.joinpath(*_OPS.split("."))).as_posix()] = _digest(path)
        fresh = {name for name in _private_imports(path) if name not in seen}
        seen |= fresh
        waiting += sorted(fresh)
    return dict(sorted(found.items()))


def hash_of(files: Mapping[str, str]) -> str:
    """One hash (sha256, hex) over what `kernel_files` answers; empty for nothing."""
    return canonical.digest(dict(files)) if files else ""


def code_hash(packages: Path | None = None) -> str | None:
    """Hash over the sources of all our kernels, whoever uses them: with the same one, two launches ran the same code.

    None where they are not installed. Only files count: an editor's lock is named as a source, and leads nowhere.

    Raises:
        UsageError: a file cannot be read.
    """
    home = packages if packages is not None else _installed()
    folder = None if home is None else home.joinpath(*_PRIVATE.split("."))
    if folder is None or not folder.is_dir():
        return None
    return canonical.digest([[path.name, _digest(path)] for path in sorted(folder.glob("*.py")) if path.is_file()])


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs between two answers of `kernel_files`, in words, naming a few files; empty where nothing does."""
    kinds = {
        "changed": [name for name in before if name in now and before[name] != now[name]],
        "gone": [name for name in before if name not in now],
        "new": [name for name in now if name not in before],
    }
    return ", ".join(f"{_some(sorted(names))} {kind}" for kind, names in kinds.items() if names)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _installed() -> Path | None:
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


def _digest(path: Path) -> str:
    try:
        return canonical.file_digest(path)
    except OSError as error:
        raise UsageError(error.strerror or str(error), file=path) from None


def _private_imports(path: Path) -> Iterator[str]:
    """Modules of `xkernels.ops._details` that a file imports, wherever in it."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise UsageError(f"is no Python: {error.msg}", file=path, line=error.lineno or None) from None
    except (ValueError, RecursionError, MemoryError) as error:  # a NUL for some Pythons; nested too deeply
        raise UsageError(f"is no Python: {error or type(error).__name__}", file=path) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            # `from package import module` and `from module import name` are spelled alike: try both.
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.startswith(f"{_PRIVATE}."))
