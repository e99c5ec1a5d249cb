"""A commit installed into an environment of its own: what it holds, what it is refused for, and how long it is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from moegate import canonical
from moegate.errors import InfraError, UsageError
from orchestrator.pools.isolation import PYTHON, LaunchResult
from orchestrator.pools.isolation.process import ProcessIsolation
from orchestrator.scalars import GitRef
from orchestrator.sources import Environment, Sources, cache_root, layout_of, old_environments, unpack
from orchestrator.sources.environments import lay_out
from tests.unit.sources.conftest import PROJECT, Commit


class Starter:
    """Starts builders as a scheduler does, and counts them."""

    def __init__(self) -> None:
        self.started = 0

    def __call__(self, argv: tuple[str, ...], writes: Path, reads: Sequence[Path]) -> LaunchResult:
        self.started += 1
        real = [sys.executable if part == PYTHON else part for part in argv]
        done = subprocess.run(real, check=False, cwd=writes, stdin=subprocess.DEVNULL)
        return LaunchResult(done.returncode)


@pytest.fixture
def starter() -> Starter:
    return Starter()


def says(environment: Environment, program: str) -> str:
    argv = [str(environment.python), "-P", "-c", program]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, env={"PATH": "/usr/bin"}, cwd="/")
    return done.stdout.strip()


def test_the_environment_has_the_commits_packages_and_this_interpreters_dependencies(
    repository: Path, commit: Commit, starter: Starter
) -> None:
    sha = commit()
    (repository / "moegate/__init__.py").write_text("MARK = 'edited since'\n")
    with Sources(repository) as sources:
        made = sources.prepare(sha, ProcessIsolation(), starter)
        assert says(made, "import moegate; print(moegate.MARK, moegate.__file__)") == (
            f"committed {next(made.root.glob('lib/python*'))}/site-packages/moegate/__init__.py"
        )
        version = "import importlib.metadata as m; print(m.version('moegate'))"
        assert says(made, version) == f"0.1.0+g{sha[:12]}"
        assert says(made, "import numpy; print(numpy.__file__)") == says_here("import numpy; print(numpy.__file__)")
        assert says(made, "import moegate._configs as c; print(*c.__path__)").endswith("moegate/_configs")
        # Children of a launch are started with its own sys.executable: they run the commit too.
        again = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import moegate; print(moegate.MARK)'])"
        assert says(made, again) == "committed"


def says_here(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def test_the_kernels_of_a_commit_are_known_before_they_run(repository: Path, commit: Commit, starter: Starter) -> None:
    kernel = "kernels/xkernels/ops/_details/moe.py"
    project = PROJECT.replace('"xkernels.ops"]', '"xkernels.ops", "xkernels.ops._details"]')
    first = commit({kernel: "x = 1\n", "pyproject.toml": project})
    expected = canonical.tree_digest(repository / "kernels/xkernels/ops/_details")
    second = commit({kernel: "x = 2\n"})
    with Sources(repository) as sources:
        hashes = [sources.prepare(sha, ProcessIsolation(), starter).kernel_hash for sha in (first, second)]
    assert hashes[0] == expected != hashes[1]


def test_a_commit_is_installed_once_per_interpreter_whoever_asks(
    repository: Path, commit: Commit, starter: Starter
) -> None:
    sha = commit()
    found: list[Environment] = []
    runs = [Sources(repository), Sources(repository)]
    threads = [
        threading.Thread(target=lambda run=run: found.append(run.prepare(sha, ProcessIsolation(), starter)))
        for run in (*runs, *runs)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert starter.started == 1
    assert len(found) == 4
    assert len(set(found)) == 1
    for run in runs:
        run.__exit__()


def test_what_a_run_holds_is_not_removed_and_what_nobody_holds_is(
    repository: Path, commit: Commit, starter: Starter
) -> None:
    sha = commit()
    with Sources(repository) as sources:
        made = sources.prepare(sha, ProcessIsolation(), starter)
        assert old_environments(0.0, remove=True) == []
        assert made.python.exists()
    assert old_environments(3600.0, remove=True) == []
    assert old_environments(0.0, remove=False) == [str(made.root)]
    assert made.python.exists()
    assert old_environments(0.0, remove=True) == [str(made.root)]
    assert [path.suffix for path in cache_root().iterdir()] == [".lock"]


def test_an_environment_that_could_not_be_made_leaves_nothing_and_is_tried_again(
    repository: Path, commit: Commit, starter: Starter
) -> None:
    sha = commit()
    with Sources(repository) as sources:
        with pytest.raises(InfraError, match=f"source {sha[:12]} cannot be installed: exit 7"):
            sources.prepare(sha, ProcessIsolation(), lambda argv, writes, reads: LaunchResult(7))
        assert [path for path in cache_root().iterdir() if path.is_dir()] == []
        assert sources.prepare(sha, ProcessIsolation(), starter).python.exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kernel_hash": 5}'])
def test_an_environment_whose_record_is_damaged_is_made_again(
    repository: Path, commit: Commit, starter: Starter, text: str
) -> None:
    sha = commit()
    with Sources(repository) as sources:
        made = sources.prepare(sha, ProcessIsolation(), starter)
    (made.root / "moegate-source.json").write_text(text)
    with Sources(repository) as sources:
        assert sources.prepare(sha, ProcessIsolation(), starter) == made
    assert starter.started == 2


def test_a_wheel_of_the_commit_would_hold_the_same_files(repository: Path, commit: Commit, tmp_path: Path) -> None:
    sha = commit()
    layout = layout_of(repository, sha)
    unpack(repository, sha, tuple(layout.packages.values()), tmp_path / "tree")
    lay_out(layout, sha, tmp_path / "tree", tmp_path / "site")
    built = "from setuptools.build_meta import build_wheel; import sys; print(build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", built, str(tmp_path)], cwd=repository, capture_output=True, text=True)
    if done.returncode != 0 and "No module named 'setuptools'" in done.stderr:
        pytest.skip("setuptools is not installed")
    wheel = zipfile.ZipFile(tmp_path / done.stdout.strip().splitlines()[-1])
    theirs = {name for name in wheel.namelist() if ".dist-info/" not in name}
    ours = {p.relative_to(tmp_path / "site").as_posix() for p in (tmp_path / "site").rglob("*") if p.is_file()}
    assert {name for name in ours if ".dist-info/" not in name} == theirs
    assert "moegate/_configs/triton_3_8_0/E=8.json" in theirs
    assert "xkernels/ops/unlisted/deep.py" not in theirs


HOSTILE = {
    "another project": (PROJECT.replace('"moegate"\nversion', '"other"\nversion'), "is of 'other'"),
    "not TOML": ("[project\n", "is not TOML"),
    "packages found, not listed": (
        PROJECT.replace('packages = ["moegate"', 'unused = ["moegate"'), "does not list its packages"
    ),
    "a package that is a path": (PROJECT.replace('"moegate.stats"', '"../../etc"'), "is not the name of a package"),
    "a folder outside": (PROJECT.replace('"kernels/xkernels"', '"../elsewhere"'), "lies outside the repository"),
    "an absolute folder": (PROJECT.replace('"kernels/xkernels"', '"/etc"'), "lies outside the repository"),
    "data outside": (PROJECT.replace('"py.typed"', '"../../*"'), "package-data leads outside"),
    "data that takes for ever": (PROJECT.replace('"py.typed"', '"**/**/*"'), "is not read"),
    "data that is no file": (PROJECT.replace('"py.typed"', '"./"'), "names no file"),
    "a folder with NUL": (PROJECT.replace('"kernels/xkernels"', r'"kernels\u0000"'), "lies outside the repository"),
    "a number without end": ("x = " + "9" * 5000, "is not TOML"),
    "nested without end": ("x = " + "[" * 100_000, "is not TOML"),
    "a version with a path": (PROJECT.replace('"0.1.0"', '"../0.1.0"'), "no version that can be installed"),
}  # fmt: skip


@pytest.mark.parametrize(("project", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_commit_that_would_reach_outside_itself_is_refused(
    repository: Path, commit: Commit, project: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        layout_of(repository, commit({"pyproject.toml": project}))


@pytest.mark.parametrize(
    "ref",
    ["--upload-pack=x", "-h", "a..b", "a b", "a\nb", "a\0b", "$(id)", "`id`", "main;id", "../x", "HEAD:moegate",
     "HEAD^{/x}", "HEAD@{1}", "x" * 300, "\u202emain"],
)  # fmt: skip
def test_a_ref_that_is_more_than_a_name_is_refused(ref: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(GitRef).validate_python(ref)


def test_links_of_a_commit_are_not_followed(repository: Path, commit: Commit, tmp_path: Path) -> None:
    (repository / "moegate" / "secret.py").symlink_to("stats/__init__.py")
    sha = commit()
    layout = layout_of(repository, sha)
    unpack(repository, sha, tuple(layout.packages.values()), tmp_path / "tree")
    lay_out(layout, sha, tmp_path / "tree", tmp_path / "site")
    assert not (tmp_path / "site/moegate/secret.py").exists()
    (repository / "moegate" / "passwd.py").symlink_to("/etc/passwd")
    with pytest.raises(InfraError, match="cannot be unpacked"):
        unpack(repository, commit(), ("moegate",), tmp_path / "other")


def test_a_commits_own_build_and_hooks_do_not_run(
    repository: Path, commit: Commit, starter: Starter, tmp_path: Path
) -> None:
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    for hook in ("post-checkout", "post-merge"):
        (repository / ".git/hooks" / hook).write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
        (repository / ".git/hooks" / hook).chmod(0o755)
    sha = commit({"setup.py": trap, "conftest.py": trap, "moegate/stats/__init__.py": trap})
    with Sources(repository) as sources:
        sources.prepare(sha, ProcessIsolation(), starter)
    assert not (tmp_path / "ran").exists()


def test_a_commit_larger_than_can_be_held_is_refused(
    repository: Path, commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.sources.commit.MAX_ARCHIVE_BYTES", 100_000)
    sha = commit({"moegate/stats/__init__.py": "#" * 200_000})
    with pytest.raises(InfraError, match="more than"):
        unpack(repository, sha, ("moegate",), tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_installing_is_quick(repository: Path, commit: Commit, starter: Starter) -> None:
    sha = commit()
    began = processor_seconds()
    with Sources(repository) as sources:
        sources.prepare(sha, ProcessIsolation(), starter)
    assert processor_seconds() - began < 10.0  # about one second, and not that of whoever else is on this machine


def processor_seconds() -> float:
    """Of this process and of all that it started and has seen end."""
    return sum(os.times()[:4])
