"""Where two arms' answers part."""

from __future__ import annotations

import pytest

from orchestrator.compare.divergence import first_divergence


def detail(**answers: object) -> dict[str, object]:
    return {"answers": answers}


def said(*tokens: int, logprobs: tuple[float, ...] = (), text: str = "") -> dict[str, object]:
    return {"tokens": list(tokens), "text": text, "logprobs": list(logprobs)}


def test_the_earliest_place_of_all_samples_is_told_with_both_tokens() -> None:
    old = detail(a=said(1, 2, 3, 4), b=said(5, 6, 7, logprobs=(-0.1, -0.2, -0.3)), c=said(9, 9))
    new = detail(a=said(1, 2, 3, 8), b=said(5, 0, 7, logprobs=(-0.15, -0.9, -0.3)), c=said(9, 9))
    found = first_divergence(old, new)
    assert found is not None
    assert (found.samples, found.diverged, found.sample, found.position) == (3, 2, "b", 1)
    assert (found.baseline, found.candidate) == ("6 (-0.200)", "0 (-0.900)")
    assert found.median_position == 2.0
    assert found.largest_gap == pytest.approx(0.05), "only while both said the same"
    assert found.sentence().startswith("2 of 3 answers differ, first b at token 1: 6 (-0.200) became 0 (-0.900)")


def test_equal_answers_and_how_far_apart_their_chances_are() -> None:
    found = first_divergence(detail(a=said(1, 2, logprobs=(-1.0, -2.0))), detail(a=said(1, 2, logprobs=(-1.0, -2.25))))
    assert found is not None
    assert (found.diverged, found.sample, found.largest_gap) == (0, None, 0.25)
    assert found.sentence() == "all 1 answers are the same; log-probabilities differ by at most 0.25"


def test_a_shorter_answer_parts_where_it_ends() -> None:
    found = first_divergence(detail(a=said(1, 2)), detail(a=said(1, 2, 3)))
    assert found is not None
    assert (found.position, found.baseline, found.candidate) == (2, "the end", "3")


def test_texts_are_compared_where_a_server_tells_no_tokens() -> None:
    found = first_divergence(detail(a=said(text="t1 t2")), detail(a=said(1, 2, text="t1 t9")))
    assert found is not None
    assert (found.unit, found.position, found.baseline, found.candidate) == ("character", 4, "'2'", "'9'")


@pytest.mark.parametrize("bad", [{}, {"answers": 3}, {"answers": {"a": 1}}, {"answers": {"z": {"tokens": [1]}}}])
def test_nothing_in_common_is_nothing_to_compare(bad: dict[str, object]) -> None:
    assert first_divergence(detail(a=said(1)), bad) is None
    assert first_divergence(bad, detail(a=said(1))) is None


@pytest.mark.parametrize("tokens", ["12", [True], [float("nan")], [[1]], None])
def test_what_is_no_list_of_tokens_is_not_one(tokens: object) -> None:
    found = first_divergence(detail(a={"tokens": tokens}), detail(a=said(1)))
    assert found is not None
    assert found.unit == "character"
