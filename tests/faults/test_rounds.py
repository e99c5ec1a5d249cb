"""Runs that are hit at points and moments that a seed chooses lose nothing, do nothing twice and leave nothing.

`make test-faults-long` plays 500 rounds and sweeps every point. The short series is always of the same seed, a long one
draws its own; MOEGATE_FAULT_SEED plays one again (0: draws).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.standin.environment import number

HARNESS = Path(__file__).with_name("harness")
ROUNDS = number("MOEGATE_FAULT_ROUNDS", 20, least=1)
LONG = ROUNDS > 20
SEED = number("MOEGATE_FAULT_SEED", 0 if LONG else 1, least=0)


def harness(what: str, *options: str, out: Path) -> dict[str, Any]:
    argv = [sys.executable, "-P", str(HARNESS), what, f"--seed={SEED}", f"--out={out}", *options]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)  # the seed, and on a failure which round to play again
    assert done.returncode == 0, done.stdout
    report: dict[str, Any] = json.loads(out.read_text())
    return report


@pytest.mark.slow
@pytest.mark.timeout(30 * max(ROUNDS, 20))
def test_random_faults_and_the_result_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    report = harness("rounds", f"--rounds={ROUNDS}", out=tmp_path / "report.json")
    assert report["rounds"] == ROUNDS
    assert report["wrong"] == 0
    assert report["orchestrators"] >= 3 * ROUNDS
    assert report["peak_rss_mib"] < 300


@pytest.mark.slow
@pytest.mark.timeout(3600 if LONG else 300)
def test_hits_at_every_point_of_a_small_run(tmp_path: Path) -> None:
    """All points in the long run, each 60th here."""
    report = harness("sweep", f"--every={1 if LONG else 60}", out=tmp_path / "report.json")
    assert report["wrong"] == 0
    assert report["points_hit"] == report["rounds"] >= 4
    assert {name.split()[0] for name in report["points"]} == {"kill", "full"}


AT_ONCE = """
import signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from session import Fault, Workshop
shop = Workshop(Path(sys.argv[2]))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
    print(shop.orchestrate(shop.folder / number.name, "small", Fault("at once", signals=((0.0, number),))).code)
"""


def test_a_signal_before_an_orchestrator_is_up_is_answered_as_later_ones_are(tmp_path: Path) -> None:
    """On a busy machine a round's first signal comes as early as that."""
    argv = [sys.executable, "-P", "-c", AT_ONCE, str(HARNESS), str(tmp_path)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=200, check=True)
    assert done.stdout.split() == ["143", "130", "-9"]


# Faults of the list in docs/faults.md that have points of their own: what happens there, and at which.
AT_POINTS = [
    ("kill", "journal final: *", 3),
    ("kill", "rename result.json: after", 1),
    ("kill", "rename configs: *", 2),
    ("full", "journal *: torn", 5),
    ("clock", "journal l*: written", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("action", "names", "least"), AT_POINTS, ids=[f"{row[0]} {row[1]}" for row in AT_POINTS])
def test_hit_at_a_point(action: str, names: str, least: int, tmp_path: Path) -> None:
    report = harness("sweep", f"--actions={action}", f"--names={names}", out=tmp_path / "report.json")
    assert report["wrong"] == 0
    assert report["points_hit"] >= least
