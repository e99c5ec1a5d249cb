"""The command that a report shows for a cell: it sets what the run set, and leaves the finished run alone."""

import subprocess
import time
from pathlib import Path

import pytest

from orchestrator.bundle import by_hand
from orchestrator.pools.isolation.process import spoken

CELL = "serve-1f2e3d4c5b6a"
LAUNCH = f"cells/{CELL}/attempt-2/launch-001"


@pytest.mark.parametrize("run", ["/runs/a", "/runs/with space", "/runs/a=b:c"])
def test_what_a_launch_wrote_is_written_where_the_command_is_typed(run: str, tmp_path: Path) -> None:
    command = ("printf", "%s\n", f"--out={run}/{LAUNCH}/measurement.json", f"--volume={run}/{LAUNCH}:{run}/{LAUNCH}",
               f"--turns={run}/{LAUNCH}/turns", f"--configs={run}/configs/tune-1", "it's", "")  # fmt: skip
    line = by_hand(command, Path(run), CELL)
    said = subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert said.split("\n") == [
        f"--out={tmp_path}/measurement.json", f"--volume={tmp_path}:{tmp_path}", f"--configs={run}/configs/tune-1",
        "it's", "", "",
    ]  # fmt: skip


def test_two_arms_typed_in_one_folder_do_not_write_over_each_other(tmp_path: Path) -> None:
    command = ("sh", "-c", 'printf x > "${0#--out=}"', f"--out=/runs/a/{LAUNCH}/measurement.json")
    for arm in ("untuned", "it's"):
        line = by_hand(command, Path("/runs/a"), CELL, arm)
        subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")) == [
        "it's/measurement.json", "untuned/measurement.json",
    ]  # fmt: skip


def test_a_command_of_nothing_but_slashes_is_shown_at_once() -> None:
    """A journal that somebody sent may hold one; what it may name is looked for in what a path can be long."""
    began = time.process_time()
    own = "/cells/c/attempt-1/launch-0"
    assert by_hand(["x", "/" * 200_000, own + "/" * 200_000], Path("/r"), "c").startswith("x ///")
    assert time.process_time() - began < 5.0


def test_a_run_that_was_moved_is_known_by_its_folders() -> None:
    command = ("tuner", f"--out=/elsewhere/run/{LAUNCH}/tuned", f"--result=/elsewhere/run/{LAUNCH}/measurement.json")
    assert by_hand(command, Path("/here"), CELL) == 'tuner --out="$PWD"/tuned --result="$PWD"/measurement.json'


def test_what_the_run_set_is_said_and_no_mark_and_no_secret() -> None:
    env = {"TRITON_INTERPRET": "1", "A": "two words; $HOME", "MOEGATE_RUN": "r", "MOEGATE_LAUNCH": "l", "MY_TOKEN": "x",
           "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}  # fmt: skip
    argv = spoken(("python", "-m", "serving"), env)
    assert argv == (
        "env", "A=two words; $HOME", "OMP_NUM_THREADS=2", "TRITON_INTERPRET=1", "python", "-m", "serving",
    )  # fmt: skip
    assert by_hand(argv, Path("/r"), CELL).startswith("env 'A=two words; $HOME' OMP_NUM_THREADS=2 TRITON_INTERPRET=1 ")
    assert spoken(("python",), {"MOEGATE_RUN": "r"}) == ("python",)
