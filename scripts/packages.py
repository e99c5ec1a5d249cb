#!/usr/bin/env python3
"""Renew the explicit package list of pyproject.toml from the folders that have an `__init__.py`.

Usage: scripts/packages.py [--check]      with --check: print what differs and exit 1, change nothing.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOP = ("moegate", "orchestrator", "reports", "serving", "tuner", "kernels/xkernels")
DATA = ("moegate._configs",)  # kernels/configs: data under a package name, no __init__.py
_LIST = re.compile(r"(?ms)^packages = \[\n.*?^\]\n")


def found() -> list[str]:
    """Return the dotted names of all packages in the tree, sorted."""
    names = {name for name in DATA if (ROOT / "kernels" / "configs").is_dir()}
    for top in TOP:
        home = (ROOT / top).parent
        for file in (ROOT / top).rglob("__init__.py"):
            names.add(file.parent.relative_to(home).as_posix().replace("/", "."))
    return sorted(names)


def main(argv: list[str]) -> int:
    """Rewrite (or, with --check, compare) the list."""
    path = ROOT / "pyproject.toml"
    text = path.read_text()
    wanted = "packages = [\n" + "".join(f'    "{name}",\n' for name in found()) + "]\n"
    renewed, count = _LIST.subn(lambda _: wanted, text)
    if count != 1:
        print("pyproject.toml: no `packages = [` list", file=sys.stderr)
        return 2
    if renewed == text:
        return 0
    if "--check" in argv:
        have, want = set(re.findall(r'"([\w.]+)"', _LIST.findall(text)[0])), set(found())
        print(f"packages missing: {sorted(want - have)}, gone: {sorted(have - want)}; run scripts/packages.py")
        return 1
    path.write_text(renewed)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
