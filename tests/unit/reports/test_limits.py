"""Runs with more cells, launches, ops and digits than anybody's: the page stays small, and is made in bounded time."""

from __future__ import annotations

import dataclasses
import re
import resource
import time
from collections.abc import Callable

import pytest

from moegate.records import Launch, Measurement, RunBundle
from reports import html


def _with_launches(run: RunBundle, change: Callable[[Measurement], Measurement]) -> RunBundle:
    """The run with one serve cell's measurements changed."""
    cell = next(c.id for c in run.plan.cells if c.kind == "serve" and not c.null)
    changed = {**run.measurements, cell: tuple(change(m) for m in run.measurements[cell])}
    return dataclasses.replace(run, measurements=changed)


def test_launches_without_end_are_not_drawn_without_end(green: RunBundle) -> None:
    def repeated(m: Measurement) -> Measurement:
        many = m.launches * (5000 // len(m.launches))
        return dataclasses.replace(m, launches=tuple(dataclasses.replace(x, order=n) for n, x in enumerate(many)))

    run = _with_launches(green, repeated)
    text = html.render(run)
    assert "400 launches of 4994 in order: " in text
    assert len(text) < html.MAX_BYTES
    assert max(int(width) for width in re.findall(r'viewBox="0 0 (\d+) 84"', text)) < 5000


def test_configurations_of_ops_without_end_are_not_tables_without_end(green: RunBundle) -> None:
    def many_ops(m: Measurement) -> Measurement:
        def of(launch: Launch) -> Launch:
            assert launch.proof is not None
            use = launch.proof.configs[0]
            uses = tuple(dataclasses.replace(use, op=f"op{n}") for n in range(20_000))
            return dataclasses.replace(launch, proof=dataclasses.replace(launch.proof, configs=uses))

        return dataclasses.replace(m, launches=tuple(map(of, m.launches)))

    run = _with_launches(green, many_ops)
    began = time.process_time()
    text = html.render(run)
    assert "op19999" not in text
    assert len(text) < html.MAX_BYTES
    assert time.process_time() - began < 30


def test_series_and_numbers_beyond_reading_are_shown_short_or_left_out(green: RunBundle) -> None:
    def odd(m: Measurement) -> Measurement:
        series = {"ttft_ms": [10**400, 1e308, -1e308, 5e-324] + [1.0] * 30, "tpot_ms": [0.0, 5e-324] * 20}
        launches = (dataclasses.replace(x, wall_s=1e300, detail={**x.detail, "series": series}) for x in m.launches)
        return dataclasses.replace(m, launches=tuple(launches))

    run = _with_launches(green, odd)
    text = html.render(run)
    assert "1.000e+300 s" in text
    assert not re.search(r"\d{40}", text)


def test_300_cells_weigh_less_than_one_and_a_half_megabytes(many: Callable[[int], RunBundle]) -> None:
    bundle = many(300)
    chatty = tuple(dataclasses.replace(o, log_tail="a long line of a server's log\n" * 400) for o in bundle.outcomes)
    text = html.render(dataclasses.replace(bundle, outcomes=chatty))
    assert len(text.encode()) < 1_500_000
    assert len(re.findall(r'class="detail(?: matters)?"', text)) == 300


@pytest.mark.slow
def test_10_000_cells_render_in_time_and_memory(many: Callable[[int], RunBundle]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bundle = many(10_000)
    started = time.process_time()
    text = html.render(bundle)
    assert time.process_time() - started < 20
    assert text.count("<tr data-v=") == 10_000
    assert "quietest cells have a row but no drill-down" in text
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 1 << 20
