"""The checker of the invariants is able to fail: each kind of damage to a good run is found, by its letter."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moegate import canonical, journal
from moegate.locks import FileLock

HARNESS = Path(__file__).with_name("harness")
Body = dict[str, Any]


def load_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fault_check", HARNESS / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = load_check()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a small run has ended well."""
    folder = tmp_path_factory.mktemp("good")
    argv = [sys.executable, "-P", str(HARNESS), "sweep", "--every=1000000", f"--keep={folder}"]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=120)
    return folder


class Shop:
    """A copy of that run, which a test may damage."""

    def __init__(self, folder: Path) -> None:
        self.run, self.ledger, self.locks = (
            folder / "reference-small-1",
            folder / "reference-small-1.ledger",
            folder / "locks",
        )

    def result(self) -> Path:
        return next(self.run.glob("cells/check-*/*/result.json"))

    def bodies(self) -> list[Body]:
        return [{"kind": e.kind, "time": e.time, "data": e.data} for e in journal.read(self.run / "journal")]

    def rewrite(self, bodies: list[Body]) -> None:
        texts = [canonical.dumps({**body, "seq": number}) for number, body in enumerate(bodies)]
        lines = [f'{text[:-1]},"sum":"{journal._sum(text)}"}}\n' for text in texts]
        (self.run / "journal").write_text("".join(lines))

    def edit(self, change: Callable[[list[Body]], object]) -> None:
        bodies = self.bodies()
        change(bodies)
        self.rewrite(bodies)

    def wrong(self) -> set[str]:
        return {line[0] for line in check.after(self.run, self.ledger, self.locks)}


@pytest.fixture
def shop(finished: Path, tmp_path: Path) -> Shop:
    return Shop(Path(shutil.copytree(finished, tmp_path / "shop")))


def last(bodies: list[Body], kind: str) -> int:
    return max(at for at, body in enumerate(bodies) if body["kind"] == kind)


def test_a_good_run_has_nothing_wrong(shop: Shop) -> None:
    shop.edit(lambda bodies: None)
    assert shop.wrong() == set()
    assert list(check.differences(check.results(shop.run), check.results(shop.run))) == []


JOURNAL: dict[str, tuple[str, Callable[[list[Body]], object]]] = {
    "a verdict missing": ("a", lambda b: b.pop(last(b, "final"))),
    "a verdict twice": ("a", lambda b: b.append(b[last(b, "final")])),
    "a slot leased twice": ("b", lambda b: b.insert(last(b, "done"), b[last(b, "lease")])),
    "a stage again after it passed": ("h", lambda b: b.extend([b[last(b, "lease")], b[last(b, "done")]])),
    "an attempt without an end": ("h", lambda b: b.pop(last(b, "done"))),
    "a launch that nobody announced": ("h", lambda b: b.pop(last(b, "launch"))),
    "another hash": ("c", lambda b: b[last(b, "done")]["data"].update(sha256="0" * 64)),
}


@pytest.mark.parametrize("name", JOURNAL)
def test_damage_to_the_journal_is_found(shop: Shop, name: str) -> None:
    letter, change = JOURNAL[name]
    shop.edit(change)
    assert letter in shop.wrong()


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


FILES: dict[str, tuple[str, Callable[[Shop], object]]] = {
    "a result that changed": ("c", lambda s: replaced(s.result(), '"files": 4', '"files": 5')),
    "a result that is gone": ("c", lambda s: s.result().unlink()),
    "other counts in the gate": ("e", lambda s: replaced(s.run / "gate.json", '"passed": 5', '"passed": 4')),
    "other counts in JUnit": ("e", lambda s: replaced(s.run / "junit.xml", 'tests="5"', 'tests="4"')),
    "a temporary file": ("g", lambda s: (s.run / ".plan.json.7.tmp").touch()),
    "a launch's folder": ("g", lambda s: next(s.run.glob("cells/*/attempt-1")).joinpath("launch-000").mkdir()),
    "a foreign attempt": ("g", lambda s: next(s.run.glob("cells/*")).joinpath("attempt-9").mkdir()),
    "a child that met another": ("b", lambda s: (s.ledger / "launches").open("a").write("overlap /a/b/c\n")),
    "a child that ran twice": (
        "h",
        lambda s: (s.ledger / "launches").write_text((s.ledger / "launches").read_text() * 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_damage_to_the_files_is_found(shop: Shop, name: str) -> None:
    letter, change = FILES[name]
    change(shop)
    assert letter in shop.wrong()


def test_a_process_and_a_lock_that_remain_are_found(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "LEFT_S", 0.2)
    run_id = next(body["data"]["run"] for body in shop.bodies() if body["kind"] == "run")
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "MOEGATE_RUN": run_id}) as child:
        assert shop.wrong() == {"g"}
        child.kill()
    with FileLock(shop.run / "lock"):
        assert shop.wrong() == {"g"}
    assert shop.wrong() == set()


def test_a_gate_that_passes_without_a_verdict_is_found(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [SimpleNamespace(state="PASSED"), SimpleNamespace(state="PLANNED")]
    bundle = SimpleNamespace(outcomes=outcomes, gate=SimpleNamespace(exit=0))
    monkeypatch.setattr(check, "bundle_of", lambda run: bundle)
    assert "f" in shop.wrong()


def test_another_number_in_a_result_is_a_difference(shop: Shop) -> None:
    mine = check.results(shop.run)
    other = json.loads(json.dumps(mine))
    other["gate"]["counts"]["passed"] = 4
    assert list(check.differences(mine, other)) == ["i: /gate/counts/passed: 5 is not 4"]
