"""Make an environment around laid-out packages; run by the interpreter that is to use it, on a host or in a container.

    PYTHON -c <this file> TARGET PACKAGES

The environment sees everything that the interpreter itself sees, after its own packages, so that nothing is downloaded
and both arms run with the same torch and Triton. Only the standard library is used: the interpreter may be an image's.
"""

from __future__ import annotations

import compileall
import shutil
import sys
import venv
from pathlib import Path


def build(target: Path, packages: Path) -> Path:
    """Make the environment `target` holding a copy of `packages`; returns its site-packages.

    Raises OSError where the folder cannot be written.
    """
    below = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    venv.EnvBuilder(symlinks=True, with_pip=False).create(target)
    site = next((target / "lib").glob("python*")) / "site-packages"
    shutil.copytree(packages, site, dirs_exist_ok=True)
    # Unlike a plain path in a .pth file, addsitedir also reads the .pth files inside: an engine may be found that way.
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in below)
    (site / "interpreter.pth").write_text(lines, encoding="utf-8")
    # Here and not at the first launch, which would be the slower one; a container mounts it read-only.
    compileall.compile_dir(site, quiet=2, workers=1)
    return site


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
