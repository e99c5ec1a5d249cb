"""`serving bench`: one launch of a server under load, as a Measurement."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from moegate.errors import InfraError, UsageError
from moegate.paths import write_atomic
from moegate.records import Launch, Measurement
from moegate.turns import END, READY, Marks, done, go
from serving import apikey
from serving.account import Account
from serving.load.client import Event, Target
from serving.load.drive import Run, drive
from serving.load.metrics import METRICS, percentile, pooled, samples, series, summary
from serving.load.workload import Workload

__all__ = ["Limits", "Model", "bench", "find_model", "measurement", "merged", "void_reason"]

PRIMARY = "output_throughput"
_OF_A_ROUND = ("duration", "output_throughput", "median_tpot_ms", "client", "server")


@dataclass(frozen=True)
class Limits:
    """What the client may be late by before its launch is void.

    The 99th percentile of event-loop lag may reach `lag_ms`, or `lag_share` of the median time per token where that
    is more; a client that uses more than `cpu_share` of one processor is the bottleneck itself. In an open loop the
    99th percentile of lateness has the same limit.
    """

    lag_ms: float = 20.0
    lag_share: float = 0.25
    cpu_share: float = 0.85


@dataclass(frozen=True)
class Model:
    """What `/v1/models` says: the name; the positions of one sequence and the vocabulary (0: not told)."""

    name: str
    room: int
    vocab: int


async def _get(url: str) -> Any:
    timeout = aiohttp.ClientTimeout(total=30)
    session = aiohttp.ClientSession(timeout=timeout, headers=apikey.headers())
    async with session, session.get(url) as response:
        if response.status == 401:
            raise apikey.refused(url)
        if response.status != 200:
            raise InfraError(f"{url} answers {response.status}")
        return await response.json(content_type=None)


def find_model(base_url: str) -> Model:
    """Ask the server for its model; InfraError where it does not answer, UsageError where it wants another key."""
    try:
        answer = asyncio.run(_get(base_url.rstrip("/") + "/v1/models"))
        first = answer["data"][0]
        return Model(str(first["id"]), int(first.get("max_model_len") or 0), int(first.get("vocab_size") or 0))
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise InfraError(f"{base_url} does not answer as an OpenAI server: {error}") from None


def bench(
    target: Target,
    workload: Workload,
    account: Callable[[], Account],
    *,
    warm_up: int | None = None,
    primary: str = PRIMARY,
    limits: Limits | None = None,
    events: Path | None = None,
    rounds: int = 1,
    turns: Path | None = None,
    warmed: Callable[[], None] | None = None,
) -> Measurement:
    """Run the load and return the Measurement of one launch.

    Args:
        target: the server.
        workload: the load.
        account: asks the server for its account; called after the load.
        warm_up: parallel warm-up requests; at least the concurrency, which is the default (open loop: 8).
        primary: the metric that the gate reads.
        limits: when a lagging client voids the launch.
        events: JSONL file for the per-request log.
        rounds: how often the whole load is put on; a launch's values are one per round.
        turns: folder of `moegate.turns` marks; each round waits there for its turn, so that launches can alternate.
        warmed: called between the warm-up and the load of each round, for who wants to know what the load alone did.
    """
    if primary not in {metric.name for metric in METRICS}:
        raise UsageError(f"unknown metric {primary!r}", field="metric", fix=", ".join(m.name for m in METRICS))
    least = workload.concurrency or 8
    parallel = max(least, warm_up or least)
    started = datetime.now(UTC).isoformat(timespec="milliseconds")
    began = time.perf_counter()
    marks = None if turns is None else Marks(turns)
    runs = [_round(target, workload, parallel, marks, number, warmed) for number in range(rounds)]
    if events is not None:
        write_event_log(events, runs)
    if marks is not None:
        marks.wait(END)  # a partner may still be measured: asking a server for its account is work too
    about, wall = account(), time.perf_counter() - began
    chosen = limits or Limits()
    return merged([measurement(run, workload, about, started=started, wall_s=wall, primary=primary, limits=chosen)
                   for run in runs])  # fmt: skip


def _round(
    target: Target,
    workload: Workload,
    parallel: int,
    marks: Marks | None,
    number: int,
    warmed: Callable[[], None] | None,
) -> Run:
    """One load, warm-up included, when it is its turn."""
    if marks is not None:
        if number == 0:
            marks.set(READY)
        marks.wait(go(number))
    run = asyncio.run(drive(target, workload, parallel, warmed))
    if marks is not None:
        marks.set(done(number))
    return run


def merged(rounds: Sequence[Measurement]) -> Measurement:
    """One measurement of one launch from those of its rounds: a value per round, medians in `detail`, all voids.

    What a round lacks (it has no gap between pieces where each answer came in one) the launch lacks.
    """
    first = rounds[0]
    if len(rounds) == 1:
        return first
    launches = [measured.launches[0] for measured in rounds]
    names = {name for launch in launches for name, value in launch.detail.items() if isinstance(value, int | float)}
    numbers = {name: [float(launch.detail.get(name, math.nan)) for launch in launches] for name in sorted(names)}
    detail = {
        **{name: value for name, value in launches[0].detail.items() if name not in numbers},
        **{name: statistics.median(values) for name, values in numbers.items() if all(map(math.isfinite, values))},
        "completed": int(sum(numbers["completed"])),
        "series": pooled([launch.detail.get("series", {}) for launch in launches]),
        "errors": sorted({error for launch in launches for error in launch.detail["errors"]})[:5],
        "rounds": [{name: launch.detail[name] for name in _OF_A_ROUND if name in launch.detail} for launch in launches],
    }  # fmt: skip
    void = next((launch.void_reason for launch in launches if launch.void_reason), None)
    found = [{one.metric: one for one in launch.samples} for launch in launches]
    values = tuple(
        replace(one, values=tuple(value for known in found for value in known[one.metric].values))
        for one in launches[0].samples
        if all(one.metric in known for known in found)
    )
    failed = next((measured for measured in rounds if measured.status != "ok"), None)
    return replace(
        first,
        status="ok" if failed is None else "failed",
        work={"requests": sum(measured.work["requests"] for measured in rounds)},
        launches=(replace(launches[0], samples=values, void_reason=void, detail=detail),),
        failure=None if failed is None else failed.failure,
    )


def measurement(
    run: Run, workload: Workload, account: Account, *, started: str, wall_s: float, primary: str, limits: Limits
) -> Measurement:
    """Make the record of one launch from what was seen and what the server says."""
    numbers = {name: value for name, value in summary(run).items() if math.isfinite(value)}
    client = client_numbers(run)
    void = void_reason(run, numbers, client, limits)
    completed = int(numbers["completed"])
    detail = {
        **numbers,
        "client": client,
        "series": series(run),
        "requests_sha256": workload.digest,
        "load": {key: value for key, value in asdict(workload).items() if value is not None},
        "errors": sorted({event.error for event in run.events if event.error})[:5],
    }
    if run.served is not None:
        detail["server"] = dict(run.served)
    launch = Launch(
        device=account.device,
        started=started,
        wall_s=wall_s,
        samples=samples(numbers, primary) if completed else (),
        proof=account.proof,
        peak_memory_bytes=account.peak_memory_bytes,
        batch_sizes=account.batch_sizes,
        void_reason=void,
        detail=detail,
    )
    return Measurement(
        kind="serve",
        status="ok" if completed else "failed",
        device=account.device,
        environment=account.environment,
        work={"requests": completed},
        launches=(launch,),
        interpreter=account.interpreter,
        failure=None if completed else void,
    )


def client_numbers(run: Run) -> dict[str, float]:
    """The client's lag, lateness and processor time, and what HTTP adds where the server tells its own share."""
    lags = run.lags or (0.0,)
    late = [event.sent - event.scheduled for event in run.events if event.scheduled is not None and event.sent]
    out = {
        "lag_p99_ms": percentile(lags, 99) * 1e3,
        "lag_max_ms": max(lags) * 1e3,
        "cpu_s": run.cpu_s,
        "cpu_share": run.cpu_s / max(run.duration, 1e-9),
        "warm_up_requests": len(run.warm_up),
    }
    if late:
        out |= {"lateness_p99_ms": percentile(late, 99) * 1e3, "lateness_max_ms": max(late) * 1e3}
    return out | http_numbers([(event, event.server) for event in run.events if event.ok and event.server])


def http_numbers(told: Sequence[tuple[Event, dict[str, float]]]) -> dict[str, float]:
    """What lies between the client and the server's own clock, from requests of which the server told its share.

    Each side takes differences on its own clock only. The client's TPOT less the server's is the way of the last token
    less that of the first, over the tokens after the first: it is what HTTP adds to a token where the way gets longer,
    and it tells nothing (`http_per_token_us` is left out) where the first token's was as long, for the head of the
    answer goes with it. `http_per_token_most_us` always holds: no way is longer than both ways of the request together.
    """
    if not told:
        return {}
    out = {"http_ttft_ms": statistics.median(event.ttft - server["ttft_s"] for event, server in told) * 1e3}
    both = [(event.tpot, (server["latency_s"] - server["ttft_s"]) / (event.tokens - 1),
             (event.latency - server["latency_s"]) / (event.tokens - 1))
            for event, server in told if event.tpot is not None]  # fmt: skip
    if both:
        out["server_median_tpot_ms"] = statistics.median(theirs for _, theirs, _ in both) * 1e3
        out["http_per_token_most_us"] = max(statistics.median(most for _, _, most in both), 0.0) * 1e6
        added = round(statistics.median(ours - theirs for ours, theirs, _ in both) * 1e6, 3)  # servers tell whole us
        if added > 0:
            out["http_per_token_us"] = added
    return out


def void_reason(run: Run, numbers: dict[str, float], client: dict[str, float], limits: Limits) -> str | None:
    """Why this launch must not be paired, or None."""
    if numbers["failed"]:
        first = next(event.error for event in run.events if event.error)
        return f"{int(numbers['failed'])} of {int(numbers['attempted'])} requests failed: {first}"
    if numbers["short"]:
        return f"{int(numbers['short'])} requests got another number of tokens than they asked for"
    broken = [event for event in run.warm_up if event.error]
    if broken:
        return f"{len(broken)} warm-up requests failed: {broken[0].error}"
    limit = max(limits.lag_ms, limits.lag_share * numbers.get("median_tpot_ms", 0.0))
    for name, words in (("lag_p99_ms", "the client's event loop lagged"), ("lateness_p99_ms", "requests were late by")):
        if client.get(name, 0.0) > limit:
            return f"{words} {client[name]:.1f} ms at the 99th percentile; {limit:.1f} ms are allowed"
    if client["cpu_share"] > limits.cpu_share:
        return f"the client used {client['cpu_share']:.0%} of a processor; {limits.cpu_share:.0%} are allowed"
    return None


def write_event_log(path: Path, runs: Sequence[Run]) -> None:
    """Write one JSON line per request, times in seconds from the start of its round's window."""
    lines = []
    for number, run in enumerate(runs):
        for phase, event in [*(("warm-up", e) for e in run.warm_up), *(("load", e) for e in run.events)]:
            row = asdict(event) | {"phase": phase, "round": number}
            row["sent"] = round(event.sent - run.began, 6)
            row["scheduled"] = None if event.scheduled is None else round(event.scheduled - run.began, 6)
            row["arrivals"] = [round(stamp - run.began, 6) for stamp in event.arrivals]
            lines.append(json.dumps(row, separators=(",", ":")))
    write_atomic(path, "\n".join(lines) + "\n")
