"""Strategies held to their promises on recorded sweeps."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from moegate.errors import RecordError, UsageError
from moegate.journal import Journal
from tuner.config import Config
from tuner.effort import EFFORTS
from tuner.journaled import PURPOSE
from tuner.prior import dtype_class, grid_distance
from tuner.prior import load as load_prior
from tuner.problem import Problem
from tuner.replay import Recorded, load, score
from tuner.spaces import space_for
from tuner.strategies import strategy
from tuner.strategies.base import Arena, Outcome, Unit

SWEEP = Path(__file__).resolve().parents[2] / "data/h200_moe_up_bf16_exhaustive.json.gz"
HOPPER = "sm_90"


@pytest.fixture(scope="module")
def sweep() -> Recorded:
    return load(SWEEP)


def test_the_recording_is_whole(sweep: Recorded) -> None:
    assert len(sweep.sizes) == 18
    assert sweep.visited == 960 * 18
    assert len(sweep.times) == 11556
    assert len(sweep.space().configs(sweep.problem)) == 480


@pytest.mark.parametrize(
    ("effort", "exclude", "mean", "worst", "most"),
    [
        ("quick", (), 0.002, 0.02, 650),
        ("full", (), 0.0005, 0.002, 1320),
        ("quick", (HOPPER,), 0.002, 0.02, 650),
        ("full", (HOPPER,), 0.0005, 0.002, 1320),
    ],
)
def test_racing_with_a_prior(
    sweep: Recorded, effort: str, exclude: tuple[str, ...], mean: float, worst: float, most: int
) -> None:
    scored = score(sweep, strategy("racing"), load_prior().without(*exclude), EFFORTS[effort])
    assert scored.mean <= mean
    assert scored.worst <= worst
    assert scored.evaluations <= most
    assert all(row.asked for row in scored.rows)


@pytest.mark.parametrize("effort", ["quick", "full"])
def test_racing_without_a_prior(sweep: Recorded, effort: str) -> None:
    scored = score(sweep, strategy("racing"), None, EFFORTS[effort])
    assert scored.worst <= 0.03
    assert scored.share <= 0.10


@pytest.mark.parametrize(("limit", "mean", "worst"), [(32, 0.002, 0.01), (64, 0.0002, 0.0005)])
def test_the_portfolio_holds_the_optimum_of_an_architecture_it_does_not_know(
    sweep: Recorded, limit: int, mean: float, worst: float
) -> None:
    prior, space = load_prior().without(HOPPER), sweep.space()
    regrets = []
    for size in sweep.sizes:
        tiles = [space.complete(tile) for tile in prior.ranked(None, None, size, 4 * limit)]
        known = [t for t in dict.fromkeys(tiles) if t is not None and space.allows(t, sweep.problem)][:limit]
        times = [
            sweep.times[unit]
            for tile in known
            for group in (1, 16)
            if (unit := Unit(size, "up", tile.with_(GROUP_SIZE_M=group))) in sweep.times
        ]
        regrets.append(min(times) / sweep.best(size) - 1)
    assert sum(regrets) / len(regrets) <= mean
    assert max(regrets) <= worst


def test_exhaustive_finds_the_optimum_and_random_does_not(sweep: Recorded) -> None:
    assert score(sweep, strategy("exhaustive"), None).worst <= 0.004  # GROUP_SIZE_M is refined on the best four only
    assert score(sweep, strategy("random", count=60), None).worst > 0.05


def test_replay_is_deterministic(sweep: Recorded) -> None:
    first, second = (score(sweep, strategy("racing"), load_prior()) for _ in range(2))
    assert first == second


def test_the_prior_can_leave_an_architecture_out() -> None:
    prior = load_prior()
    full, less = prior.ranked(None, None, 64, 40), prior.without(HOPPER).ranked(None, None, 64, 40)
    assert full != less
    families = set(prior.counts["16bit"])
    assert HOPPER in families
    assert prior.without(*families).ranked(None, None, 64, 10)  # the kin classes fill up
    nothing = prior.without(*{f for kinds in prior.counts.values() for f in kinds})
    assert nothing.ranked(None, None, 64, 10) == []


@pytest.mark.parametrize("left_out", [(), (HOPPER,)])
def test_tiles_that_a_kernel_of_ours_is_written_for_come_first_where_it_won(left_out: tuple[str, ...]) -> None:
    prior, space, tile = load_prior().without(*left_out), space_for("fused_experts", "nvidia"), (128, 256, 128, 8, 4)
    problem = Problem("fused_experts", 64, 896, 1280, 6, "fp8_w8a8", (128, 128))
    for size in (1024, 2048, 4096):
        first, *others = prior.ranked("fp8_w8a8", (128, 128), size, 28)
        assert tuple(first[name] for name in prior.fields) == tile
        assert first not in others
        assert len(others) == 27  # as many candidates as without it
        whole = space.complete(first)
        assert whole is not None
        assert space.allows(whole, problem)
    few = prior.ranked("fp8_w8a8", (128, 128), 64, 1)[0]
    assert tuple(few[name] for name in prior.fields) != tile


@pytest.mark.parametrize(
    "text",
    ['{"schema": 1}', '{"schema": 1, "fields": ["BLOCK_SIZE_M"], "tiles": {"fp8": {"64": [[16, 2]]}}}',
     '{"schema": 1, "fields": 3, "tiles": {"fp8": {"64": [[16]]}}}', '{"schema": 2}', "[]"],
)  # fmt: skip
def test_a_damaged_prior_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "prior.json"
    file.write_text(text, encoding="utf-8")
    for how in ({"own": file}, {"path": file}):
        with pytest.raises(RecordError, match=r"prior\.json: is (a damaged|no) prior"):
            load_prior(**how)


def test_prior_words() -> None:
    assert dtype_class(None) == "16bit"
    assert dtype_class("fp8_w8a8") == "fp8"
    assert dtype_class("fp8_w8a8", (128, 128)) == "fp8_block"
    assert grid_distance(1, 16) == 4
    assert grid_distance(4096, 4096) == 0


def _unit(projection: str, block_m: int, block_n: int = 64) -> Unit:
    return Unit(1, projection, Config.of({"BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": block_n}))  # type: ignore[arg-type]


def test_projections_share_their_block_m() -> None:
    arena = Arena(1, ("up", "down"))
    rows = [(_unit("up", 16), 10.0), (_unit("up", 64), 12.0), (_unit("down", 16), 30.0), (_unit("down", 64), 20.0)]
    arena.add(Outcome(unit, 0, (us,)) for unit, us in rows)
    best = arena.joint()
    assert best is not None
    assert best[0] == 32.0
    assert {config.block_m for config in best[1].values()} == {64}
    assert [config.block_m for _, config in arena.ranked("up")] == [64, 16]


def test_an_error_removes_a_config_for_good() -> None:
    arena = Arena(1, ("up",))
    unit = _unit("up", 16)
    arena.add([Outcome(unit, 0, (1.0,)), Outcome(unit, 1, error="crashed"), Outcome(unit, 2, (0.5,))])
    assert arena.joint() is None
    assert arena.seen("up", unit.config)


@pytest.mark.parametrize("text", [b"{}", b'{"meta": {}, "records": [[1]]}', b"\x1f\x8bnot gzip", b"[]"])
def test_files_that_are_no_recording(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with pytest.raises((RecordError, UsageError)):
        load(path)


def test_two_projections_with_descriptors_are_read(tmp_path: Path) -> None:
    fields = ["M", "projection", "BLOCK_SIZE_M", "num_warps", "USE_TMA", "us", "error"]
    meta = {"E": 8, "N": 64, "H": 128, "topk": 2, "dtype": "bfloat16", "fields": fields}
    rows = [[1, "up", 16, 4, 0, 5.0, None], [1, "up", 16, 4, 1, 4.0, None], [1, "down", 16, 4, 0, 3.0, None],
            [1, "down", 32, 4, 0, None, "over-shared"]]  # fmt: skip
    path = tmp_path / "sweep.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"meta": meta, "records": rows}).encode()))
    recorded = load(path)
    assert recorded.projections == ("up", "down")
    assert recorded.best(1) == 7.0
    assert recorded.space().has_tma
    assert list(recorded.errors.values()) == ["over-shared"]


OURS = Path(__file__).resolve().parents[2] / "data/h200_moegate_bf16_tma.json.gz"


@pytest.fixture(scope="module")
def ours() -> dict[str, Recorded]:
    """moegate's own kernel on an H200: both projections with and without descriptors, every config."""
    return {name: load(OURS.with_name(f"h200_moegate_{name}_tma.json.gz")) for name in ("bf16", "fp8")}


@pytest.mark.parametrize(("name", "tiles"), [("bf16", 480), ("fp8", 320)])
def test_the_sweeps_of_our_own_kernel_are_whole(ours: dict[str, Recorded], name: str, tiles: int) -> None:
    recorded = ours[name]
    assert len(recorded.sizes) == 18
    plain = {u for u in (*recorded.times, *recorded.errors) if u.config["GROUP_SIZE_M"] == 1}
    assert len(plain) == tiles * 2 * 2 * 18  # descriptors on and off, two projections
    # GROUP_SIZE_M on the best four tiles, and on what the tunings chose
    assert all(
        len({u.config for u in recorded.times if u.batch_size == size and u.config["GROUP_SIZE_M"] > 1}) >= 12
        for size in recorded.sizes
    )


@pytest.mark.parametrize(
    ("name", "effort", "known", "mean", "worst", "most"),
    [
        ("bf16", "quick", True, 0.002, 0.02, 1300),
        ("bf16", "full", True, 0.0005, 0.005, 3250),
        ("bf16", "quick", False, 0.002, 0.01, 2600),
        ("bf16", "full", False, 0.002, 0.01, 3000),
        ("fp8", "quick", True, 0.002, 0.02, 1300),
        ("fp8", "full", True, 0.0006, 0.006, 3250),
        ("fp8", "quick", False, 0.002, 0.01, 2600),
        ("fp8", "full", False, 0.002, 0.01, 3000),
    ],
)
def test_both_projections_of_our_own_kernel(
    ours: dict[str, Recorded], name: str, effort: str, known: bool, mean: float, worst: float, most: int
) -> None:
    recorded = ours[name]
    assert recorded.projections == ("up", "down")
    assert most <= 0.15 * recorded.visited
    prior = load_prior().without(HOPPER) if known else None
    scored = score(recorded, strategy("racing"), prior, EFFORTS[effort])
    assert scored.mean <= mean
    assert scored.worst <= worst
    assert scored.evaluations <= most
    for row in scored.rows:
        assert row.chosen_us >= row.best_us


@pytest.mark.parametrize("name", ["sm90", "hopper"])
def test_an_architecture_that_the_prior_does_not_hold_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"one of .*sm_90"):
        load_prior().without(HOPPER, name)


def outcome_without_fields(path: Path) -> None:
    with Journal.open(path, purpose=PURPOSE) as journal:
        journal.append("environment", env="e", problem={}, vendor="nvidia", device_name="d", environment={})
        journal.append("outcome", env="e")


@pytest.mark.parametrize("kind", ["deep", "list", "text", "cut", "pipe", "folder", "missing", "huge number", "journal"])
def test_what_is_no_sweep_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    contents = {
        "deep": b"[" * 100_000, "list": b"[1]", "text": b"\xff\xfe", "cut": SWEEP.read_bytes()[:999],
        "huge number": b'{"meta":{"fields":["M","us","error"],"E":1,"N":1,"H":1,"topk":1},"records":[[1e999,1,1]]}',
    }  # fmt: skip
    if kind in contents:
        path.write_bytes(contents[kind])
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "journal":
        outcome_without_fields(path)
    with pytest.raises(UsageError):
        load(path)


SMALL = {
    "meta": {
        "fields": ["M", "BLOCK_SIZE_M", "us", "error"],
        "E": 8,
        "N": 64,
        "H": 64,
        "topk": 2,
        "device": "NVIDIA H200",
    },
    "records": [[1, 16, 5.0, None], [1, 32, 4.0, None]],
}


@pytest.mark.parametrize(
    ("meta", "records", "words"),
    [
        ({}, [], "no config of it has a time"),
        ({}, [[1, 16, None, "crashed"]], "no config of it has a time"),
        ({}, [[1, 16, 0, None]], "0.0 us is no time"),
        ({}, [[1, 16, -5, None]], "-5.0 us is no time"),
        ({}, [[0, 16, 5, None]], "0 is no batch size"),
        ({}, [[1, 16, 5, None], [1, "x", 5, None]], "not every BLOCK_SIZE_M is a number"),
        ({}, [[1, None, 5, None]], "not every BLOCK_SIZE_M is a number"),
        ({"vendor": "acme"}, SMALL["records"], "vendor is 'acme'"),
        ({"vendor": [1]}, SMALL["records"], r"vendor is '\[1\]'"),
        ({"device": {"name": 5}}, SMALL["records"], "is no recorded sweep"),
        ({"fields": ["M", "projection", "us", "error"]}, SMALL["records"], "'16' is no projection"),
    ],
)
def test_what_no_sweep_can_have_measured_is_refused(
    tmp_path: Path, meta: dict[str, object], records: object, words: str
) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(SMALL))
    assert load(path).best(1) == 4.0
    path.write_text(json.dumps({"meta": {**SMALL["meta"], **meta}, "records": records}))  # type: ignore[dict-item]
    with pytest.raises(RecordError, match=words):
        load(path)
