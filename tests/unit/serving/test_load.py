"""The load client's arithmetic: what is sent, what is counted, and when a launch is void."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moegate.errors import UsageError
from moegate.records import DeviceIdentity, Measurement, Proof, from_json, to_json
from serving.account import Account
from serving.launch import launched_from
from serving.load.accuracy import Answer, Sample, read_samples, score
from serving.load.bench import Limits, client_numbers, measurement, merged, write_event_log
from serving.load.client import Event
from serving.load.drive import Run
from serving.load.metrics import lines, percentile, samples, series, summary
from serving.load.workload import Workload

ACCOUNT = Account(DeviceIdentity("cpu", "x", "cpu:x"), Proof("moegate", "auto", "torch"), {"torch": "2"}, {"2": 5}, 7)


def load(**changes: object) -> Workload:
    return Workload(**{"requests": 20, "input": 6, "output": 5, "seed": 3, "vocab": 50, "concurrency": 4, **changes})


def test_the_same_seed_sends_the_same() -> None:
    assert load().calls == load().calls
    assert load().digest == load().digest
    assert load(seed=4).digest != load().digest
    assert load(output=6).digest != load().digest
    assert all(0 <= token < 50 for call in load().calls for token in call.prompt)
    assert {len(call.prompt) for call in load().calls} == {6}


def test_poisson_arrivals_have_the_rate_and_never_go_back() -> None:
    calls = load(requests=4000, input=1, concurrency=None, rate=50.0).calls
    times = np.array([call.at for call in calls])
    gaps = np.diff(times, prepend=0.0)
    assert (gaps > 0).all()
    assert times[-1] == pytest.approx(4000 / 50, rel=0.06)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.06)  # exponential: deviation equals mean


def test_warm_up_meets_every_batch_size_once() -> None:
    bursts = load().warm_up(4)
    assert [len(burst) for burst in bursts] == [1, 2, 4]
    assert [call.output for call in bursts[0] + bursts[1]] == [1, 1, 1]
    assert [call.output for call in bursts[2]] == [2, 3, 4, 5]
    assert {c.prompt for b in bursts for c in b}.isdisjoint({c.prompt for c in load().calls})
    capped = load(room=10, output=4).warm_up(8)[-1]
    assert max(call.output for call in capped) == 4


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rate": 1.0}, "load"), ({"concurrency": None}, "load"), ({"requests": 0}, "requests"),
        ({"input": 0}, "input"), ({"output": -1}, "output"), ({"concurrency": 0}, "concurrency"),
        ({"concurrency": None, "rate": 0.0}, "rate"), ({"room": 10}, "input"), ({"vocab": 0}, "vocab"),
    ],
)  # fmt: skip
def test_impossible_loads_are_refused(changes: dict, field: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(**changes)
    assert caught.value.field == field


def event(index: int, sent: float, stamps: list[float], tokens: int, asked: int = 5, **more: object) -> Event:
    return Event(index, asked, 6, sent=sent, arrivals=stamps, tokens=tokens, **more)  # type: ignore[arg-type]


def run(*events: Event, lags: tuple[float, ...] = (0.001,), cpu: float = 0.1, warm: tuple[Event, ...] = ()) -> Run:
    return Run(events, 10.0, 12.0, lags, cpu, warm)


def test_numbers_are_those_of_bench_serving() -> None:
    events = (
        event(0, 10.0, [10.1, 10.2, 10.3, 10.5], 5, server={"ttft_s": 0.09, "latency_s": 0.49}),
        event(1, 10.0, [10.3, 10.7], 5),
        event(2, 10.5, [11.0], 1, asked=1),
        event(3, 11.0, [], 0, error="HTTP 500"),
    )
    numbers = summary(run(*events))
    assert numbers["completed"] == 3
    assert (numbers["failed"], numbers["short"]) == (1, 0)
    assert numbers["total_output_tokens"] == 11
    assert numbers["output_throughput"] == pytest.approx(5.5)
    assert numbers["request_throughput"] == pytest.approx(1.5)
    assert numbers["total_throughput"] == pytest.approx((18 + 11) / 2)
    ttfts, tpots = [100.0, 300.0, 500.0], [100.0, 100.0]
    itls = [100.0, 100.0, 200.0, 400.0]
    for name, values in (("ttft", ttfts), ("tpot", tpots), ("itl", itls), ("e2e_latency", [500.0, 700.0, 500.0])):
        assert numbers[f"mean_{name}_ms"] == pytest.approx(np.mean(values))
        assert numbers[f"median_{name}_ms"] == pytest.approx(np.median(values))
        assert numbers[f"std_{name}_ms"] == pytest.approx(np.std(values), abs=1e-9)
        for percent in (90, 95, 99):
            assert numbers[f"p{percent}_{name}_ms"] == pytest.approx(np.percentile(values, percent))


def _way(first: float, last: float) -> Event:
    """Five tokens, 100 ms apart on the server; how long the first and the last were on their way, in seconds."""
    stamps = [10.0 + 0.2 + first, 10.0 + 0.2 + 0.4 + last]
    return event(0, 10.0, stamps, 5, server={"ttft_s": 0.2, "latency_s": 0.6})


def test_what_http_adds_to_a_token_is_told_only_where_it_can_be() -> None:
    told = client_numbers(run(_way(0.001, 0.009)))
    assert told["http_per_token_us"] == pytest.approx(2000.0)
    assert told["http_per_token_most_us"] == pytest.approx(2250.0)
    assert told["server_median_tpot_ms"] == pytest.approx(100.0)
    # The head of the answer goes with the first token: its way is the longer one, and HTTP takes no time off a token.
    quick = client_numbers(run(_way(0.009, 0.001)))
    assert "http_per_token_us" not in quick
    assert quick["http_per_token_most_us"] == pytest.approx(250.0)
    assert quick["http_ttft_ms"] == pytest.approx(9.0)


def test_percentile_is_numpys() -> None:
    draw = np.random.default_rng(0)
    for size in (1, 2, 7, 100):
        values = draw.random(size)
        for percent in (0, 1, 50, 99, 100):
            assert percentile(list(values), percent) == pytest.approx(np.percentile(values, percent))


def record(*events: Event, **more: object) -> Measurement:
    return measurement(run(*events, **more), load(), ACCOUNT, started="t", wall_s=2.0,  # type: ignore[arg-type]
                       primary="output_throughput", limits=Limits())  # fmt: skip


GOOD = event(0, 10.0, [10.1, 10.5], 5)


@pytest.mark.parametrize(
    ("events", "more", "words"),
    [
        ((GOOD,), {}, None),
        ((GOOD, event(1, 10.0, [], 0, error="HTTP 503: full")), {}, "1 of 2 requests failed: HTTP 503"),
        ((GOOD, event(1, 10.0, [10.1], 4)), {}, "another number of tokens"),
        ((GOOD,), {"lags": (0.001, 0.002, 0.9)}, "lagged"),
        ((GOOD,), {"lags": (0.024,)}, None),  # within a quarter of the time per token
        ((GOOD,), {"cpu": 1.9}, "95% of a processor"),
        ((GOOD,), {"warm": (event(0, 1.0, [], 0, error="HTTP 400"),)}, "1 warm-up requests failed"),
        ((event(0, 10.9, [11.0, 11.4], 5, scheduled=10.0),), {}, "late by 900"),
    ],
)
def test_what_voids_a_launch(events: tuple, more: dict, words: str | None) -> None:
    reason = record(*events, **more).launches[0].void_reason
    assert (reason is None) if words is None else (words in (reason or ""))


def test_the_record_is_whole_and_survives_a_round_trip() -> None:
    made = record(GOOD)
    again = from_json(Measurement, json.loads(json.dumps(to_json(made))))
    assert again == from_json(Measurement, to_json(made))
    launch = again.launches[0]
    assert launch.primary().metric == "output_throughput"
    assert launch.primary().values == (2.5,)
    assert launch.proof.resolved_backend == "torch"
    assert (launch.batch_sizes, launch.peak_memory_bytes) == ({"2": 5}, 7)
    assert launch.detail["requests_sha256"] == load().digest
    assert again.work == {"requests": 1}
    assert {s.better for s in launch.samples if s.metric.endswith("_ms")} == {"lower"}
    assert sum(s.primary for s in samples(summary(run(GOOD)), "median_tpot_ms")) == 1


def test_a_launch_without_a_good_request_failed() -> None:
    made = record(event(0, 10.0, [], 0, error="boom"))
    assert (made.status, made.work, made.launches[0].samples) == ("failed", {"requests": 0}, ())
    assert "boom" in made.failure


def test_rounds_of_a_launch_are_its_values_and_one_bad_one_voids_it() -> None:
    slow = event(0, 10.0, [10.1, 10.9], 5)
    made = merged([record(GOOD), record(slow)])
    (launch,) = made.launches
    assert made.work == {"requests": 2}
    values = {s.metric: s.values for s in launch.samples}
    assert values["median_tpot_ms"] == pytest.approx((100.0, 200.0))
    assert launch.detail["median_tpot_ms"] == pytest.approx(150.0)
    assert launch.detail["series"]["tpot_ms"] == pytest.approx([100.0, 200.0])
    assert (launch.detail["completed"], len(launch.detail["rounds"]), launch.void_reason) == (2, 2, None)
    assert merged([record(GOOD)]) == record(GOOD)
    void = merged([record(GOOD), record(GOOD, lags=(0.9,))])
    assert "lagged" in (void.launches[0].void_reason or "")
    failed = merged([record(GOOD), record(event(0, 10.0, [], 0, error="boom"))])
    assert (failed.status, failed.launches[0].samples) == ("failed", ())
    assert "boom" in (failed.failure or "")


@pytest.mark.parametrize("lacking", [0, 1])
def test_what_one_round_lacks_the_launch_lacks(lacking: int) -> None:
    """An answer that came in one piece has no gaps: its round has no inter-token latency, the other one has."""
    rounds = [record(GOOD), record(GOOD)]
    rounds[lacking] = record(event(0, 10.0, [10.5], 5))
    (launch,) = merged(rounds).launches
    assert launch.primary() is not None
    assert {len(s.values) for s in launch.samples} == {2}
    assert "median_tpot_ms" in launch.detail
    assert not [name for name in (*launch.detail, *(s.metric for s in launch.samples)) if name.endswith("_itl_ms")]


def test_event_log(tmp_path: Path) -> None:
    write_event_log(tmp_path / "e.jsonl", [run(GOOD, warm=(event(0, 9.0, [9.5], 1),))])
    rows = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    assert [row["phase"] for row in rows] == ["warm-up", "load"]
    assert rows[1]["arrivals"] == [0.1, 0.5]
    assert rows[0]["sent"] == -1.0


def test_scores() -> None:
    answer = Answer((1, 2, 3), "", (-0.1, -0.3, -0.2))
    assert score(Sample("a", (1,), 3, (1, 2, 3)), answer) == 1.0
    assert score(Sample("a", (1,), 3, (1, 2, 4)), answer) == 0.0
    assert score(Sample("a", (1,)), answer) == pytest.approx(np.exp(-0.2))
    assert score(Sample("a", (1,)), Answer((), "x", ())) == 0.0


def test_shipped_samples_are_what_the_script_makes() -> None:
    import runpy

    text = Path("examples/samples/ocr-200.jsonl").read_text()
    assert text.splitlines() == list(runpy.run_path("examples/samples/make.py")["lines"]())
    read = read_samples(Path("examples/samples/ocr-200.jsonl"))
    assert len({sample.id for sample in read}) == 200
    assert max(max(sample.prompt) for sample in read) < 512


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds 0 samples"), ('{"id": 3, "prompt": [1]}', "text `id`"), ('{"id": "a", "prompt": []}', "token ids"),
        ('{"id": "a", "prompt": [1]}\n{"id": "a", "prompt": [2]}', ":2: id 'a' appears twice"),
        ('{"id": "a", "prompt": [true]}', "token ids"), ("[1]", "must be an object"), ("{", "not JSON"),
        ('{"id": "a", "prompt": [1], "output": "x"}', "number of tokens"),
    ],
)  # fmt: skip
def test_wrong_samples_are_refused_with_their_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "s.jsonl").write_text(text)
    with pytest.raises(UsageError, match=r"s\.jsonl") as caught:
        read_samples(tmp_path / "s.jsonl")
    assert words in str(caught.value)


def test_distributions_keep_their_shape_within_their_length() -> None:
    made = run(*(event(i, 10.0, [10.0 + (i + 1) / 1000, 11.0], 5) for i in range(1000)))
    kept = series(made)["ttft_ms"]
    assert len(kept) == 200
    assert kept == sorted(kept)
    assert np.median(kept) == pytest.approx(500, rel=0.02)
    assert series(run(GOOD)) == {"ttft_ms": [100.0], "tpot_ms": [100.0], "itl_ms": [400.0], "e2e_latency_ms": [500.0]}
    assert record(GOOD).launches[0].detail["series"]["ttft_ms"] == [100.0]


@pytest.mark.parametrize(
    "told", [{"x": 1}, [1], "text", {"base_url": "u"}, {"base_url": "u", "spec": {}}, {"base_url": "u", "spec": None}]
)
def test_a_file_that_no_launch_announced_is_refused(tmp_path: Path, told: object) -> None:
    (tmp_path / "launch.json").write_text(json.dumps(told))
    with pytest.raises(UsageError, match="announce"):
        launched_from(None, tmp_path / "launch.json")


def test_numbers_are_shown_with_their_units() -> None:
    numbers = {"duration": 2.0, "completed": 8, "output_throughput": 1062.4, "mean_ttft_ms": 5.1, "why": "x"}
    shown = [line.split() for line in lines({**numbers, "p99_itl_ms": float("nan")})]
    assert shown == [["duration", "2", "s"], ["completed", "8"], ["output_throughput", "1062", "tok/s"],
                     ["mean_ttft_ms", "5.1"]]  # fmt: skip


def test_a_server_that_has_ended_is_said_to_have(tmp_path: Path) -> None:
    gone = tmp_path / "server.json"
    with pytest.raises(UsageError, match="announced itself there, or it has ended") as error:
        launched_from(None, gone)
    assert str(gone) in str(error.value.fix)
