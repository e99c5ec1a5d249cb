"""What a run says while it goes on, and the time that it thinks it still takes."""

import io
from dataclasses import replace

import pytest

from moegate.records import (
    ComparePolicy,
    DeviceIdentity,
    GatePolicy,
    Launch,
    Plan,
    PlannedCell,
    PoolSpec,
    Samples,
)
from moegate.stats import log_ratio
from orchestrator.plan.estimate import stage_seconds
from orchestrator.scheduler.progress import Progress, Remaining, duration, pair_line
from orchestrator.scheduler.todo import host_slot

PLAN = Plan(
    "p", "m", "0", "t", "0",
    (PlannedCell("c1", "tune", "c1", {}, "", 1.0), PlannedCell("c2", "serve", "c2", {}, "", 1.0)),
    (), (), (), (), None, GatePolicy(),
)  # fmt: skip


def test_progress_never_moves_the_cursor():
    Progress(PLAN, stream := io.StringIO()).note("a\x1b[2J\x07\u202eb\nc")
    assert stream.getvalue().endswith("a\\x1b[2J\\x07\\u202eb\\nc\n")
    assert [duration(seconds) for seconds in (3, 65, 3725)] == ["3s", "1m05s", "1h02m"]


# A run of the default matrix on two cores without history: planned in all and for screening, then what its stages took.
COLD = [
    ("check", 2.0, None, 0.5, None), ("kernel-test", 6.0, None, 3.5, None), ("tune", 40.0, None, 7.1, None),
    ("kernel-bench", 100.0, 30.0, 13.5, 32.4), ("kernel-bench", 30.0, 30.0, 13.4, None),
    ("serve", 36.0, 36.0, 13.6, 29.8), ("serve", 120.0, 36.0, 23.6, 53.0),
]  # fmt: skip


@pytest.mark.parametrize("pairs", [7, 3])  # of the control's confirmation: all, or futile after a few
@pytest.mark.parametrize("slow", [1.0, 3.0])
def test_the_time_left_is_what_the_stages_to_come_take_whatever_gave_up_before(slow, pairs):
    cells = [
        PlannedCell(f"c{n}", kind, "", {}, "", 1.0, estimate_s=whole, screen_s=screen)
        for n, (kind, whole, screen, *_) in enumerate(COLD)
    ]
    compare = ComparePolicy("a", "b", screen=3, confirm=7, futility=3)
    left = Remaining(replace(PLAN, cells=tuple(cells), compare=compare))
    firsts = [(cell, "only" if row[2] is None else "screen", row[3]) for cell, row in zip(cells, COLD, strict=True)]
    confirms = {cell.id: row[4] for cell, row in zip(cells, COLD, strict=True) if row[4] is not None}
    confirms["c5"] *= pairs / 7
    for cell, stage, _ in firsts:
        left.owes(cell, stage)
    real = slow * (sum(seconds for *_, seconds in firsts) + sum(confirms.values()))
    assert left.seconds() == 334.0
    for cell, stage, seconds in firsts:
        left.passed(cell, stage, slow * seconds)
        real -= slow * seconds
        if cell.id in confirms:
            left.owes(cell, "confirm")
        else:
            left.drop(cell)
        if cell.kind == "tune":
            assert left.seconds() > 260.0  # the kinds to come are not as far below their plan as tuning was
    for cell in cells:
        if cell.id in confirms:
            assert real <= left.seconds() * 1.05
            assert left.seconds() <= 1.1 * real + (1 - pairs / 7) * slow * 32
            left.passed(cell, "confirm", slow * confirms[cell.id])
            left.drop(cell)
            real -= slow * confirms[cell.id]
    assert left.seconds() == 0.0


def test_the_time_left_of_a_pool_is_shared_by_its_slots():
    cells = tuple(PlannedCell(f"c{n}", "serve", "", {}, "", 1.0, pool="p", estimate_s=10.0) for n in range(6))
    plan = replace(PLAN, cells=cells, pools=(PoolSpec("p", "cpu", slots=4), PoolSpec("q", "cpu")))
    left = Remaining(plan)
    assert left.seconds() == 15.0
    left.drop(cells[0])  # it failed: whatever it took, the others are thought to take no more
    assert left.seconds() == 12.5
    left.passed(cells[1], "only", 20.0)
    left.drop(cells[1])
    assert left.seconds() == 20.0


def test_a_control_that_confirms_does_not_stretch_what_the_others_are_thought_to_take():
    compare = ComparePolicy("a", "b", screen=5, confirm=60)
    control, *rest = (
        PlannedCell(f"c{n}", "serve", "", {}, "", 1.0, pool="p", control=n == 0, estimate_s=whole, screen_s=10.0)
        for n, whole in enumerate((10.0, 130.0, 130.0))
    )
    left = Remaining(replace(PLAN, cells=(control, *rest), compare=compare, pools=(PoolSpec("p", "cpu"),)))
    for cell in (control, *rest):
        left.owes(cell, "screen")
    assert left.seconds() == 270.0
    left.passed(control, "screen", 10.0)
    left.owes(control, "confirm")
    assert left.seconds() == 120.0 + 260.0  # its own confirmation is known of as soon as it is owed
    left.passed(control, "confirm", 120.0)
    left.drop(control)
    assert left.seconds() == 260.0
    left.passed(rest[0], "screen", 10.0)  # and one that stops after its screening does not shrink them
    left.drop(rest[0])
    assert left.seconds() == 130.0


def test_a_resumed_confirmation_is_not_thought_to_screen_again():
    cell = PlannedCell("c0", "serve", "", {}, "", 1.0, pool="p", estimate_s=130.0, screen_s=10.0)
    plan = replace(PLAN, cells=(cell,), compare=ComparePolicy("a", "b"), pools=(PoolSpec("p", "cpu"),))
    left = Remaining(plan)
    left.owes(cell, "confirm")
    assert left.seconds() == 120.0
    left.screened(cell, 5.0)  # as the earlier session's journal has it
    assert left.seconds() == 60.0


def test_earlier_runs_that_hardly_confirmed_do_not_make_a_confirmation_short():
    compare = ComparePolicy("a", "b", screen=3, confirm=7, futility=3)
    for whole, confirm in ((20.9, 46.7), (19.0, 46.7), (38.0, 18.0), (70.0, 50.0)):
        cell = PlannedCell("c0", "serve", "", {}, "", 1.0, estimate_s=whole, screen_s=20.0)
        assert stage_seconds(cell, "confirm", compare) == pytest.approx(confirm, abs=0.05)


def test_the_next_stage_does_not_read_like_a_retry():
    progress = Progress(PLAN, stream := io.StringIO())
    progress.started(PLAN.cells[0], "confirm", 2, host_slot())
    assert stream.getvalue().endswith(" confirm on host/0\n")
    progress.started(PLAN.cells[0], "confirm", 3, host_slot(), again=True)
    assert stream.getvalue().endswith(" confirm on host/0, again (attempt 3)\n")


def test_a_resumed_run_counts_what_was_finished_before():
    progress = Progress(PLAN, stream := io.StringIO())
    progress.kept(PLAN.cells[0])
    progress.begins()
    assert stream.getvalue().endswith("]   1 cell to do\n")
    progress.finished(PLAN.cells[1], "PASSED", "")
    assert "[2/2 cells]" in stream.getvalue()
    Progress(replace(PLAN, cells=(replace(PLAN.cells[0], estimate_s=90.0),)), stream).begins()
    assert stream.getvalue().endswith("]   1 cell to do, about 1m30s\n")


def test_a_terminal_gets_a_bar_and_a_file_gets_lines():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream in (io.StringIO(), Terminal()):
        progress = Progress(PLAN, stream)
        progress.finished(PLAN.cells[0], "PASSED", "")
        assert ("1 of 2 cells" in stream.getvalue()) == stream.isatty()
        progress.close()
        progress.note("after")
        assert stream.getvalue().endswith("after\n")


def pair(arms, values, metric="median_tpot_ms", unit="ms", better="lower", void=None):
    device = DeviceIdentity("cpu", "x", "cpu:x")
    return [
        Launch(device, "t", 1.0, (Samples(metric, unit, better, (value,), primary=True),),
               arm=arm, pair=0, order=order, stage="screen", void_reason=void)
        for order, (arm, value) in enumerate(zip(arms, values, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("launches", "arms", "said"),
    [
        (pair(("tuned", "untuned"), (49.55, 161.94)), ("untuned", "tuned"),
         "median_tpot_ms untuned 161.9 ms, tuned 49.55 ms; gain +226.8 %"),
        (pair(("untuned", "tuned"), (84123.4, 84000.0), "kernel_time_geomean", "us"), ("untuned", "tuned"),
         "kernel_time_geomean untuned 84123 us, tuned 84000 us; gain +0.1 %"),
        (pair(("untuned", "tuned"), (4.0, 3.0), "output_throughput", "tok/s", "higher"), ("untuned", "tuned"),
         "output_throughput untuned 4 tok/s, tuned 3 tok/s; gain -25.0 %"),
        (pair(("untuned", "untuned"), (4.0, 5.0), "score", "", "higher"), ("untuned", "untuned"),
         "score untuned as A 4, untuned as B 5; gain +25.0 %"),
        (pair(("untuned", "tuned"), (4.0, 3.0), void="throttled"), ("untuned", "tuned"), "void: throttled"),
    ],
)  # fmt: skip
def test_a_pair_is_told_with_its_metric_the_value_of_each_arm_and_the_gain(launches, arms, said):
    assert pair_line(log_ratio(launches, arms, None), launches, arms, None) == said


def test_lines_say_what_a_stage_runs_and_which_way_round_a_gain_is():
    cells = (
        PlannedCell("c1", "check", "c1", {}, "", 1.0),
        PlannedCell("c2", "serve", "c2", {}, "", 1.0, arms=("untuned", "tuned")),
        PlannedCell("c3", "serve", "c3", {}, "", 1.0, arms=("untuned", "untuned"), aa=True),
    )
    plan = replace(PLAN, cells=cells, compare=ComparePolicy("untuned", "tuned", screen=3, confirm=7))
    progress = Progress(plan, stream := io.StringIO())
    progress.begins()
    progress.started(cells[0], "only", 1, host_slot())
    progress.started(cells[1], "screen", 1, host_slot())
    progress.started(cells[2], "confirm", 2, host_slot())
    progress.finished(cells[0], "PASSED", "")
    progress.finished(cells[1], "PASSED", "the screen did not reach the margin")
    assert [line.partition("] ")[2] for line in stream.getvalue().splitlines()] == [
        "  3 cells to do",
        "  gain: how much better candidate tuned is than baseline untuned in one pair of launches; "
        "+ is better, whatever the metric",
        "> c1 on host/0",
        "> c2 screen (3 pairs of untuned and tuned) on host/0",
        "> c3 confirm (at most 7 pairs of untuned and itself) on host/0",
        "  ok c1  [1/3 cells]",
        "done c2: the screen did not reach the margin  [2/3 cells]",
    ]
