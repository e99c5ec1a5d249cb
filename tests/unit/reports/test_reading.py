"""What a person reads for the first time: terms, which way round a gain is, how to do a launch again."""

from __future__ import annotations

import dataclasses
import re

from moegate.records import Comparison, RunBundle
from reports import html
from reports.words import LOOKS


def detail_of(text: str, cell: str) -> str:
    """The drill-down of one cell."""
    return text[text.index(f'<article class="detail" id="c-{cell}"') :].partition("</article>")[0] + "</article>"


def test_both_arms_can_be_reproduced_and_are_told_apart(green: RunBundle) -> None:
    text = html.render(green)
    found = re.findall(
        r'<p class="soft">([^<]*)</p><pre class="cmd" tabindex="0">([^<]*)</pre>', detail_of(text, "e0c44f19")
    )
    assert found == [
        ("untuned, baseline", "tuner bench &#39;e0c44f19&#39; untuned"),
        ("tuned, candidate", "tuner bench &#39;e0c44f19&#39; tuned"),
    ]
    one = detail_of(text, "d4d4c3c0")  # A/A: one arm is both sides
    assert re.findall(r'<p class="soft">([^<]*)</p><pre class="cmd"', one) == ["untuned"]
    alone = detail_of(text, "0c11aa02")
    assert '<h4>Reproduce</h4><pre class="cmd" tabindex="0">tuner bench &#39;0c11aa02&#39; </pre>' in alone


def test_launches_and_pairs_count_from_one_as_people_do(green: RunBundle) -> None:
    text = detail_of(html.render(green), "e0c44f19")
    cells = re.findall(r"<tr><td>(\d+)<td>(\w+)<td>(\d+)<td>", text)
    assert cells[:3] == [("1", "screen", "1"), ("2", "screen", "1"), ("3", "screen", "2")]
    assert cells[6] == ("1", "confirm", "1")
    assert ">output_throughput<th" in text, "the column says of what its values are"


def test_what_a_gain_is_is_said_where_gains_stand(green: RunBundle) -> None:
    text = html.render(green)
    way = "tuned ÷ untuned \N{MINUS SIGN} 1 where higher is better, untuned ÷ tuned \N{MINUS SIGN} 1 where lower is"
    for begin, end in (("verdict", "counts"), ("forest", "cells"), ("cells", "missing")):
        assert way in text[text.index(f'<section id="{begin}"') : text.index(f'<section id="{end}"')], begin
    assert f"Gain: {way}. The gain is of 8 fresh pairs alone." in detail_of(text, "e0c44f19")
    aa = detail_of(text, "d4d4c3c0")
    assert "Gain: untuned as B ÷ untuned as A \N{MINUS SIGN} 1 where higher" in aa
    square = text[text.index('<section id="square"') : text.index('<section id="forest"')]
    assert "confidence interval of the gain of a typical pair: 95 %, or the most that so few pairs allow" in square
    words = " ".join(re.sub(r"<[^>]*>", " ", text).split())
    assert "1.0 % a smaller change does not count" in words
    assert "q = 0.01 per family largest share of false alarms to expect" in words


def test_every_term_and_outcome_of_a_page_is_explained_on_it(green: RunBundle, red: RunBundle) -> None:
    for bundle in (green, red):
        text = html.render(bundle)
        shown = set(re.findall(r'<tr data-v="(\w+)"', text))
        guide = text[text.index('id="reading"') :].partition("</details>")[0]
        terms = re.findall(r"<dt>([^<]+)</dt>", guide)
        for key in shown:
            assert f"{LOOKS[key].arrow} {LOOKS[key].word}" in terms  # type: ignore[index]
        assert {"gain", "interval", "margin", "tolerance", "q", "detectable"} <= set(terms)
        assert ("tpot" in terms) == ("median_tpot_ms" in text.replace(guide, ""))
    quiet = dataclasses.replace(green, comparison=Comparison(()))
    assert "<dt>gain</dt>" not in html.render(quiet)
