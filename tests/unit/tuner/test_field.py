"""All batch sizes at once: order of answers, deadlines, and how long a sample lasts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.child.facts import settle_keys
from tuner.child.timing import Timer
from tuner.effort import EFFORTS
from tuner.prior import load as load_prior
from tuner.prior import own_tiles
from tuner.replay import Recorded, Replay, load, task_of
from tuner.strategies import strategy
from tuner.strategies.base import Outcome, Request, Runner, Unit

DATA = Path(__file__).resolve().parents[2] / "data"


@pytest.fixture(scope="module")
def both() -> Recorded:
    return load(DATA / "h200_moegate_bf16_tma.json.gz")


class Shuffled(Runner):
    """Answers in an order of its own, as compiles end."""

    def __init__(self, recorded: Recorded, seed: int) -> None:
        self.inner, self.random, self.open = Replay(recorded), random.Random(seed), list[Request]()

    def submit(self, requests: Sequence[Request]) -> None:
        self.open += requests

    def next(self) -> Outcome:
        self.inner.submit([self.open.pop(self.random.randrange(len(self.open)))])
        return self.inner.next()

    def cancel(self) -> None:
        self.open.clear()


@pytest.mark.parametrize("name", ["quick", "full"])
def test_the_order_of_answers_changes_nothing(both: Recorded, name: str) -> None:
    prior = load_prior().without("sm_90")
    task = task_of(both, replace(EFFORTS[name], abort=1e9), prior)
    found = [strategy("racing").tune(task, Shuffled(both, seed)) for seed in range(3)]
    assert all(f.choices == found[0].choices for f in found)
    assert len({f.evaluations for f in found}) == 1


@pytest.mark.parametrize("known", [True, False])
def test_a_batch_size_at_which_nothing_runs_ends_without_a_choice(both: Recorded, known: bool) -> None:
    few = {unit: us for unit, us in both.times.items() if unit.batch_size in (1, 64)}
    broken = {unit: us for unit, us in few.items() if unit.batch_size == 64}
    errors = {unit: "crashed" for unit in few if unit.batch_size == 1}
    recorded = replace(both, times=broken, errors=errors, sizes=(1, 64))  # type: ignore[arg-type]
    task = task_of(recorded, EFFORTS["quick"], load_prior() if known else None)
    assert set(strategy("racing").tune(task, Replay(recorded)).choices) == {64}


@pytest.mark.parametrize("known", [True, False])
def test_blocks_of_one_row_are_tried_at_a_few_tokens_alone(both: Recorded, known: bool) -> None:
    singles, _ = (entry.configs for entry in own_tiles(None, None))
    units = [Unit(size, p, config) for size in both.sizes for p in both.projections for config in singles]
    with_them = replace(both, times={**both.times, **dict.fromkeys(units, 1.0)})
    assert with_them.space() == both.space()
    task = task_of(with_them, EFFORTS["quick"], load_prior() if known else None)
    found = strategy("racing").tune(task, Replay(with_them))
    blocks = {size: {config.block_m for config in choice.configs.values()} for size, choice in found.choices.items()}
    assert {size for size, rows in blocks.items() if rows == {1}} == {1, 2, 4}
    assert not [size for size, rows in blocks.items() if 1 in rows and size > 4]


@pytest.mark.parametrize("known", [True, False])
def test_streamed_weights_are_tried_beyond_the_space_and_have_no_neighbours(both: Recorded, known: bool) -> None:
    _, tiles = (entry.configs for entry in own_tiles(None, None))
    units = [Unit(size, p, config) for size in both.sizes for p in both.projections for config in tiles]
    with_them = replace(both, times={**both.times, **dict.fromkeys(units, 1.0)})
    assert with_them.space() == both.space()
    assert [entry.configs for entry in with_them.own()] == [(), tiles]
    assert [entry.configs for entry in both.own()] == [(), ()]
    found = strategy("racing").tune(
        task_of(with_them, EFFORTS["quick"], load_prior() if known else None), Replay(with_them)
    )
    chosen = {size: set(choice.configs.values()) <= set(tiles) for size, choice in found.choices.items()}
    assert {size for size, streamed in chosen.items() if streamed} == {size for size in both.sizes if size <= 256}


def test_a_deadline_leaves_every_batch_size_with_a_choice(both: Recorded) -> None:
    asked = 0

    def late() -> bool:
        nonlocal asked
        asked += 1
        return asked > 200

    task = replace(task_of(both, EFFORTS["full"], load_prior()), deadline=late)
    found = strategy("racing").tune(task, Shuffled(both, 0))
    assert not found.complete
    assert set(found.choices) == set(both.sizes) == set(found.cut)
    for size, cut in found.cut.items():
        arena = found.arenas[size]
        tried = [*arena.samples, *arena.errors]
        assert cut.measured == {p: sum(q == p for q, _ in tried) for p in both.projections}
        assert all(0 < cut.measured[p] <= cut.asked[p] for p in both.projections)
    assert any(sum(cut.measured.values()) < sum(cut.asked.values()) for cut in found.cut.values())
    whole = strategy("racing").tune(replace(task, deadline=lambda: False), Replay(both))
    assert whole.complete
    assert found.evaluations < whole.evaluations


def test_a_deadline_after_the_last_request_cut_nothing(both: Recorded) -> None:
    few = replace(both, sizes=(1, 4096))
    asked = 0

    def count() -> bool:
        nonlocal asked
        asked += 1
        return False

    task = task_of(few, EFFORTS["quick"], load_prior())
    whole = strategy("racing").tune(replace(task, deadline=count), Replay(few))
    turns, asked = asked, 0
    late = replace(task, deadline=lambda: count() or asked >= turns)
    assert strategy("racing").tune(late, Replay(few)).cut == whole.cut == {}


def test_a_race_that_is_cut_says_what_it_had_come_to(both: Recorded) -> None:
    few = replace(both, sizes=(64,))
    seen: list[str] = []
    task = replace(task_of(few, EFFORTS["full"], load_prior()), deadline=lambda: "varied" in seen,
                   report=lambda stage, size, arena: seen.append(stage))  # fmt: skip
    [cut] = strategy("racing").tune(task, Replay(few)).cut.values()
    assert cut.stage == "varied"
    assert strategy("racing").tune(replace(task, deadline=lambda: True), Replay(few)).cut[64].stage == ""


def test_a_random_sample_keeps_to_the_deadline_and_has_every_default(both: Recorded) -> None:
    few = replace(both, sizes=(1, 64, 4096))
    asked = 0

    def late() -> bool:
        nonlocal asked
        asked += 1
        return asked > 60

    task = replace(task_of(few, EFFORTS["full"], None), deadline=late)
    found = strategy("random", count=20).tune(task, Replay(few))
    assert set(found.choices) == {1, 64, 4096}
    assert sum(found.cut[4096].measured.values()) < 8  # until something ran: late as it is, no more than that
    assert found.cut[4096].asked == {"up": 21, "down": 21}
    assert set(found.cut) == {64, 4096}


class Clock:
    """A device on which a launch takes `us`, and a graph as long as what was captured."""

    kind = "cuda"

    def __init__(self, us: float) -> None:
        self.us, self.now, self.launches, self.captured = us, 0.0, 0, list[int]()

    def launch(self, route: int) -> None:
        self.launches += 1

    def capture(self, work: Callable[[], Any], warmups: int = 1, small: bool = False) -> Any:
        before = self.launches
        work()
        count = self.launches - before
        self.captured.append(count)

        def replay() -> None:
            self.now += count * self.us

        return SimpleNamespace(replay=replay)

    def event(self) -> Any:
        at = SimpleNamespace(now=0.0)
        return SimpleNamespace(
            record=lambda: setattr(at, "now", self.now), elapsed_ms=lambda later: (later.at.now - at.now) / 1e3, at=at
        )


@pytest.mark.parametrize(("us", "times"), [(100.0, 1), (8.0, 4), (0.5, 8)])
def test_a_sample_is_long_enough_for_the_clock(us: float, times: int) -> None:
    device = Clock(us)
    timer = Timer(device, True)  # type: ignore[arg-type]
    assert timer.sample("x", device.launch, 5, 3, None) == pytest.approx([us] * 3)
    assert device.now == pytest.approx(us * 5 * (1 + 3 * times))  # the first replay says how long one takes
    assert timer.sample("x", device.launch, 5, 2, us / 2) == pytest.approx([us])  # given up early
    assert device.captured == [5]  # and kept


def test_every_kernel_has_its_key_before_the_first_compile() -> None:
    import tuner.engines.moegate  # noqa: F401 - loads the kernels
    from xkernels.ops._details.moe_gemm import up_gemm

    if type(up_gemm).__name__ != "JITFunction":
        pytest.skip("Triton's interpreter has no keys")
    assert settle_keys() > 20
    assert up_gemm.hash is not None
