"""Figures: where things land on their scales, and that they say what they show."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports import svg
from reports.svg.core import Scale, el, gain_ticks, log_gain, nice_ticks

GAINS = st.floats(-0.99, 50, allow_nan=False)


def parsed(picture: str) -> ET.Element:
    """A figure as XML, with title and description checked."""
    root = ET.fromstring(picture)
    assert root.get("role") == "img"
    assert root.find("title") is not None
    return root


def test_scale_clamps_and_centres() -> None:
    scale = Scale(0, 10, 100, 200)
    assert [scale(x) for x in (-5, 0, 5, 10, 99)] == [100, 100, 150, 200, 200]
    assert Scale(1, 1, 0, 10)(1) == 5


@given(GAINS, GAINS)
def test_gain_ticks_hold_zero_and_are_few(a: float, b: float) -> None:
    low, high = min(a, b, -0.01), max(a, b, 0.01)
    ticks = gain_ticks(low, high)
    assert 0.0 in ticks
    assert ticks == sorted(set(ticks))
    assert all(low <= tick <= high for tick in ticks if tick)
    assert len(ticks) <= 11


def test_nice_ticks() -> None:
    assert nice_ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert nice_ticks(5, 5) == [5]


@given(st.lists(st.tuples(GAINS, GAINS, GAINS), min_size=1, max_size=20))
def test_forest_keeps_every_interval_on_the_axis_and_in_order(rows: list[tuple[float, float, float]]) -> None:
    rows = [tuple(sorted(row)) for row in rows]  # type: ignore[misc]
    axis = svg.forest_axis([g for row in rows for g in row], 0.02)
    for low, gain, high in rows:
        assert 0 <= axis.x(low) <= axis.x(gain) <= axis.x(high) <= 1000
        root = parsed(svg.interval(axis, gain, low, high, title="t"))
        assert root.find("path[@class='ci']") is not None
    assert axis.x(-0.02) < axis.x(0) < axis.x(0.02)


def test_better_is_to_the_right_and_up() -> None:
    axis = svg.forest_axis([-0.5, 0.5], 0.02)
    assert axis.x(0.5) > axis.x(0) > axis.x(-0.5)
    plot = svg.interaction_plot(
        [svg.Slope("triton", 0.6, 0.5, 0.7, False, 0.64), svg.Slope("auto", 0.0, -0.01, 0.01, True)],
        arms=("untuned", "tuned"),
        title="t",
        desc="d",
    )
    ends = {p.get("class"): re.findall(r"[\d.]+", p.get("d", "")) for p in parsed(plot).iter("path")}
    assert float(ends["slope cand"][3]) < float(ends["slope cand"][1])
    assert ends["slope ctrl"][1] == ends["slope ctrl"][3]
    assert "diamond" in ends


def test_interaction_labels_never_overlap() -> None:
    slopes = [svg.Slope(f"b{i}", 0.01 * i, 0, 0.05, False) for i in range(5)]
    root = parsed(svg.interaction_plot(slopes, arms=("a", "b"), title="t", desc="d"))
    names = [float(t.get("y", "0")) for t in root.iter("text") if t.find("tspan") is not None]
    gaps = [abs(a - b) for a, b in zip(sorted(names), sorted(names)[1:], strict=False)]
    assert min(gaps) >= 37.9


def strip_points(order: str, stage: str = "screen") -> list[svg.StripPoint]:
    return [svg.StripPoint(1.0 + (c == "B"), c == "B", (stage, i // 2), stage, False) for i, c in enumerate(order)]


def test_strip_joins_pairs_and_separates_stages() -> None:
    points = strip_points("ABBA") + strip_points("AB", "confirm")
    root = parsed(svg.strip(points, title="t", desc="d"))
    joint = root.find("path[@class='joint']")
    assert joint is not None
    assert joint.get("d", "").count("M") == 3
    assert len(root.findall("path[@class='stage']")) == 1
    base, cand = root.find("path[@class='dot base']"), root.find("path[@class='dot cand']")
    assert base is not None
    assert cand is not None
    assert base.get("d", "").count("M") == cand.get("d", "").count("M") == 3
    assert base.get("d", "").startswith("M12 ")


def test_strip_draws_void_launches_at_the_foot_only() -> None:
    points = [*strip_points("AB"), svg.StripPoint(9.0, False, ("screen", 1), "screen", True)]
    root = parsed(svg.strip(points, title="t", desc="d"))
    void = root.find("path[@class='void']")
    assert void is not None
    assert void.get("d", "").startswith("M36 ")
    assert svg.strip([svg.StripPoint(None, False, None, "", True)], title="t", desc="d") == ""


def test_ecdf_is_monotone_and_ends_at_one() -> None:
    root = parsed(svg.ecdf([3, 1, 2] * 10, [4, 5, 6] * 10, unit="ms", title="t", desc="d"))
    curves = [p for p in root.iter("path") if p.get("class", "").startswith("slope")]
    for curve in curves:
        points = [tuple(map(float, xy.split())) for xy in curve.get("d", "M").lstrip("M").split("L")]
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        assert xs == sorted(xs)
        assert ys == sorted(ys, reverse=True)
        assert ys[-1] == 12
    assert svg.ecdf([], [1.0], unit="ms", title="t", desc="d") == ""


def test_heatmap_frames_changes_only() -> None:
    row = svg.HeatRow("BLOCK N", (svg.HeatCell("64", None, 0.2), svg.HeatCell("128", "32", 0.9)))
    root = parsed(svg.heatmap(["1", "2"], [row], title="t", desc="d"))
    assert [r.get("class") for r in root.iter("rect")] == ["h1", "h4 chg"]
    assert "was 32" in "".join(root.itertext())


def test_trend_marks_this_run() -> None:
    marks = [svg.TrendMark("2026-11-01", 0.1, 0.05, 0.15), svg.TrendMark("now", 0.2, 0.18, 0.22)]
    root = parsed(svg.trend(marks, 0.02, title="t", desc="d"))
    assert "this run" in "".join(root.itertext())
    assert svg.trend([], 0.02, title="t", desc="d") == ""


def test_share_bar_leaves_out_nothing() -> None:
    root = parsed(svg.share_bar([("improved", 3, "good"), ("failed", 0, "bad"), ("missing", 1, "gone")], title="t"))
    widths = [float(r.get("width", "0")) for r in root.iter("rect")]
    assert len(widths) == 2
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01)
    assert svg.share_bar([("x", 0, "bad")], title="t") == ""


def test_text_in_figures_is_escaped_and_clean() -> None:
    picture = svg.interaction_plot(
        [svg.Slope("<b>\x1b[31m&", 0.1, 0, 0.2, False)], arms=("<i>", "\u202ex"), title="</title>", desc="<d>"
    )
    root = parsed(picture)
    assert "<b>&" in "".join(root.itertext())
    assert "\u202e" not in picture
    assert root.find("b") is None
    assert log_gain(-5) == log_gain(-0.98)


def test_attributes_are_escaped() -> None:
    made = el("rect", class_='a" onload="x', data_x="<&\x1b[31m")
    assert made == '<rect class="a&#34; onload=&#34;x" data-x="&lt;&amp;"/>'


@pytest.mark.parametrize(("low", "high"), [(0.0, 5e-324), (-1e308, 1e308), (1e308, 1.0000001e308), (1e16, 1e16 + 2)])
def test_ticks_of_ranges_that_have_no_round_numbers_are_few(low: float, high: float) -> None:
    assert 1 <= len(nice_ticks(low, high)) <= 12


def test_a_forest_of_endless_gains_has_an_axis() -> None:
    axis = svg.forest_axis([1e300, -0.9], 0.02)
    assert 0 <= axis.x(0.0) < axis.x(1e300) <= 1000
