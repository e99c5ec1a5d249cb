"""The second race of the finals: who is foretold to win, and who plays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moegate.journal import Journal
from tuner.child.client import ChildSpec
from tuner.config import Config
from tuner.crossed import Pair, crossable, leads_of, races, second_race
from tuner.finals import Finals
from tuner.journaled import PURPOSE
from tuner.live import LiveOptions
from tuner.problem import Problem
from tuner.strategies.base import Arena, Choice, Outcome, Unit, choose


def tile(width: int, block: int = 16, **more: int) -> Config:
    return Config.of({"BLOCK_SIZE_M": block, "BLOCK_SIZE_N": width, **more})


def pair(up: int, down: int, block: int = 16) -> Pair:
    return {"up": tile(up, block), "down": tile(down, block)}


LEAD = pair(64, 64)
UP = {32: 41.0, 64: 40.0, 128: 39.0, 256: 44.0}
DOWN = {32: 21.0, 64: 20.0, 128: 19.5, 256: 30.0}


def race(pairs: list[Pair]) -> list[list[float]]:
    """The whole op takes the sum of what its tiles take within it."""
    return [[UP[p["up"].integer("BLOCK_SIZE_N")] + DOWN[p["down"].integer("BLOCK_SIZE_N")]] * 8 for p in pairs]


def test_what_is_better_in_either_projection_is_played_together() -> None:
    first = [LEAD, pair(128, 64), pair(256, 64), pair(32, 64), pair(64, 128), pair(64, 256), pair(64, 32)]
    assert crossable([LEAD], first)
    found = second_race([LEAD], first, race(first))
    assert found[0] == pair(128, 64)  # the best that was played
    assert pair(128, 128) in found  # foretold to be the best, and it is
    assert race([pair(128, 128)]) == [min(race([pair(u, d) for u, d in itertools.product(UP, DOWN)]))]
    assert pair(256, 128) not in found  # too slow to be worth a race
    assert all(a != b for a, b in itertools.combinations(found, 2))
    assert len(found) <= 8


@pytest.mark.parametrize(
    "first",
    [
        [LEAD, pair(128, 64), pair(32, 64)],
        [LEAD, pair(128, 128), pair(32, 32)],
        [LEAD, pair(64, 64, 32)],
        [LEAD],
    ],
)
def test_one_race_is_enough_where_it_does_not_tell_about_both_projections(first: list[Pair]) -> None:
    assert not crossable([LEAD], first)


def test_an_op_of_one_projection_has_one_race() -> None:
    alone: list[Pair] = [{"main": tile(width)} for width in (32, 64, 128)]
    assert not crossable([alone[0]], alone)


def test_no_second_race_where_nothing_new_is_likely() -> None:
    first = [LEAD, pair(256, 64), pair(64, 256)]
    assert second_race([LEAD], first, race(first)) == []


def test_who_did_not_run_is_not_built_on() -> None:
    first = [LEAD, pair(128, 64), pair(64, 128)]
    without = second_race([LEAD], first, [*race(first)[:2], []])
    assert pair(128, 128) not in without
    assert second_race([LEAD], first, [[], *race(first)[1:]]) == []


@pytest.mark.parametrize("runs", [True, False])
def test_the_default_comes_first_in_both_races_where_it_runs(runs: bool) -> None:
    contenders, default = [LEAD, pair(128, 64), pair(64, 128)], pair(32, 32)
    asked: list[tuple[list[Pair], int]] = []

    def timed(pairs: Sequence[Pair], rounds: int) -> list[list[float]]:
        asked.append((list(pairs), rounds))
        return race(list(pairs))

    played = races(timed, contenders, default, [*([default] if runs else []), *contenders], 8)
    assert [(pairs, race(pairs)) for pairs, _ in played] == played
    assert [rounds for _, rounds in asked] == [4, 8]
    assert [pairs[0] == default for pairs, _ in asked] == [runs, runs]
    assert pair(128, 128) in asked[1][0]


def test_a_single_race_has_all_rounds() -> None:
    asked: list[int] = []

    def timed(pairs: Sequence[Pair], rounds: int) -> list[list[float]]:
        asked.append(rounds)
        return race(list(pairs))

    assert len(races(timed, [LEAD, pair(128, 64)], LEAD, [LEAD, pair(128, 64)], 8)) == 1
    assert asked == [8]


def test_a_lead_of_another_block_is_built_on_too() -> None:
    rival, slower = pair(64, 64, 32), pair(256, 256)
    first = [slower, rival, pair(128, 64, 32), pair(64, 128, 32)]
    assert leads_of(first) == [slower, rival]
    assert crossable([slower, rival], first)
    assert not crossable([slower], first)
    assert pair(128, 128, 32) in second_race([slower, rival], first, race(first))


def test_finals_take_what_differs_in_one_projection_first() -> None:
    arena = Arena(16, ("up", "down"))
    for width, us in {32: 40.3, 64: 40.0, 128: 40.1, 256: 40.2}.items():
        arena.add([Outcome(Unit(16, "up", tile(width, GROUP_SIZE_M=1)), 0, (us,))])
        arena.add([Outcome(Unit(16, "down", tile(width, GROUP_SIZE_M=1)), 0, (us / 2,))])
    found = choose(arena, 7, ["GROUP_SIZE_M"])
    assert found is not None
    best = found.contenders[0]
    differ = [sum(other[p] != best[p] for p in best) for other in found.contenders]
    assert differ == [0, 1, 1, 1, 1, 1, 1]  # three other tiles of each
    assert crossable([best], found.contenders)
    more = choose(arena, 7, ["GROUP_SIZE_M"], more=5)
    assert more is not None
    others = [other for other in more.contenders if other not in found.contenders]
    assert len(others) == 5
    assert all(sum(other[p] != best[p] for p in best) == 2 for other in others)


class Child:
    """Answers for a child on a device where tiles take what `UP` and `DOWN` say."""

    def __init__(self, wrong: Pair | None = None) -> None:
        self.wrong = wrong
        self.asked: list[tuple[str, int]] = []

    def ask(self, verb: str, timeout_s: float, /, **args: Any) -> dict[str, Any]:
        self.asked.append((verb, args.get("rounds", 0)))
        if verb == "verify":
            found = {p: Config.of(config) for p, config in args["configs"].items()}
            bad = {"error": "wrong-result", "reason": "off by one"}
            return bad if found == self.wrong else {"max_rel": 0.0, "rms": 0.0}
        pairs: list[Pair] = [{p: Config.of(c) for p, c in each.items()} for each in args["candidates"]]
        return {"samples_us": [row[: args["rounds"]] for row in race(pairs)]}


def played(folder: Path, child: Child) -> Any:
    first = (LEAD, pair(128, 64), pair(64, 128), pair(32, 64))
    with Journal.open(folder / "journal", purpose=PURPOSE) as journal:
        problem = Problem("fused_experts", 8, 64, 64, 2, "float32")
        finals = Finals(ChildSpec(folder), problem, LiveOptions(), journal, "env")
        finals.worker = child  # type: ignore[assignment]
        return finals.play(Choice(16, LEAD, 60.0, first), pair(32, 32), 8)


def test_finals_end_with_a_pair_that_no_search_ranked(tmp_path: Path) -> None:
    child = Child()
    final = played(tmp_path, child)
    assert final.configs == pair(128, 128)
    assert (final.winner_us, final.default_us) == (58.5, 62.0)
    assert child.asked == [("finals", 4), ("finals", 8), ("verify", 0)]
    again = Child()
    assert played(tmp_path, again) == final  # over the same journal
    assert again.asked == []


def test_a_winner_that_is_wrong_gives_way_to_the_next_and_is_not_tried_again(tmp_path: Path) -> None:
    child = Child(wrong=pair(128, 128))
    final = played(tmp_path, child)
    assert final.configs == pair(128, 64)
    assert [note.split(": ")[1] for note in final.notes] == ["wrong-result"]
    assert child.asked.count(("verify", 0)) == 2
