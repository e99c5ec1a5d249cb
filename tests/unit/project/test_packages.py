"""The distribution holds what the tree holds, and the tree puts nothing in other people's way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_the_package_list_equals_the_folders() -> None:
    done = run(sys.executable, str(ROOT / "scripts" / "packages.py"), "--check", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_is_in_a_package() -> None:
    folders = [ROOT / name for name in ("moegate", "orchestrator", "reports", "serving", "tuner", "kernels/xkernels")]
    stray = [
        str(file.relative_to(ROOT))
        for folder in folders
        for file in folder.rglob("*.py")
        if not (file.parent / "__init__.py").is_file()
    ]
    assert stray == []


def test_no_package_called_kernels_comes_from_here(tmp_path: Path) -> None:
    # `kernels` is the name of a published package that engines import; ours must never stand in for it.
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s and list(s.submodule_search_locations))"
    done = run(sys.executable, "-P", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout


def test_the_programs_are_installed_and_show_help(tmp_path: Path) -> None:
    for program in ("orchestrator", "tuner", "serving"):
        done = run(sys.executable, "-P", "-m", program, "--help", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert program in done.stdout
