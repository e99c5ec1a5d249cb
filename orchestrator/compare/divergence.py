"""Where the greedy answers of two arms part: the first token that differs, sample by sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from moegate.records import Divergence

__all__ = ["first_divergence"]

_SHOWN = 40
_MOST = 1e18  # a token or a log-probability: beyond it is none


def first_divergence(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> Divergence | None:
    """Compare two launches' answers (`detail["answers"]`: sample id -> tokens, text, logprobs).

    Tokens are compared where both servers tell them, else the characters of their texts. None where a launch holds no
    answers, or where no sample is in both.
    """
    old, new = (_answers(detail.get("answers")) for detail in (baseline, candidate))
    shared = [name for name in old if name in new]
    if not shared:
        return None
    told = all(old[name]["tokens"] and new[name]["tokens"] for name in shared)
    field = "tokens" if told else "text"
    places = {name: _parting(old[name][field], new[name][field]) for name in shared}
    parted = {name: at for name, at in places.items() if at is not None}
    gaps = [gap for name in shared for gap in _gaps(old[name], new[name], places[name])] if told else []
    found = Divergence(len(shared), len(parted), "token" if told else "character", max(gaps, default=None))
    if not parted:
        return found
    first = min(parted, key=lambda name: parted[name])
    at = parted[first]
    return replace(
        found,
        sample=first[:_SHOWN],
        position=at,
        median_position=float(median(parted.values())),
        baseline=_said(old[first], field, at),
        candidate=_said(new[first], field, at),
    )


def _answers(value: object) -> dict[str, dict[str, Any]]:
    """What can be read of a launch's answers; anything that is no answer is left out."""
    if not isinstance(value, dict):
        return {}
    found: dict[str, dict[str, Any]] = {}
    for name, answer in value.items():
        if isinstance(answer, dict):
            tokens, text, chances = (answer.get(key) for key in ("tokens", "text", "logprobs"))
            found[str(name)] = {
                "tokens": tokens if _numbers(tokens) else [],
                "text": text if isinstance(text, str) else "",
                "logprobs": chances if _numbers(chances) else [],
            }
    return found


def _numbers(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(item, int | float) and not isinstance(item, bool) and abs(item) < _MOST for item in value
    )


def _parting(old: Sequence[Any], new: Sequence[Any]) -> int | None:
    """The first place where two answers differ; the end of the shorter one where it begins the longer."""
    for at, (one, other) in enumerate(zip(old, new, strict=False)):
        if one != other:
            return at
    return None if len(old) == len(new) else min(len(old), len(new))


def _gaps(old: Mapping[str, Any], new: Mapping[str, Any], until: int | None) -> list[float]:
    """How far apart the log-probabilities are while both say the same."""
    pairs = list(zip(old["logprobs"], new["logprobs"], strict=False))
    return [abs(a - b) for a, b in (pairs if until is None else pairs[:until])]


def _said(answer: Mapping[str, Any], field: str, at: int) -> str:
    """What an answer has at a place, with its log-probability where that is told."""
    if at >= len(answer[field]):
        return "the end"
    if field == "text":
        return repr(answer["text"][at : at + 12])
    chance = f" ({answer['logprobs'][at]:.3f})" if at < len(answer["logprobs"]) else ""
    return f"{answer['tokens'][at]}{chance}"
