"""How to read the page: what a gain, its interval, the rules of the gate and the words of the outcomes mean."""

from __future__ import annotations

from collections.abc import Iterable

from moegate.records import Effect, RunBundle
from reports.text import MINUS, count, one_line, percent
from reports.view.joined import Joined
from reports.words import LOOKS, Outcome

__all__ = ["Q_LINE", "gain_line", "interval_line", "outcome_lines", "reading", "ways"]

_TOLD: frozenset[Outcome] = frozenset({"moved", "unmoved", "held", "inconclusive"})
Q_LINE = "largest share of false alarms to expect among what is called improved or regressed"
_OVER = "\N{DIVISION SIGN}"

# Terms of the statistics -> what they mean; the fields are those of `_statistics`.
_TERMS = (
    ("gain", "{gain}"),
    ("interval", "{interval}"),
    ("margin", "A gain or loss counts only where fresh pairs prove it to be larger than {margin}."),
    ("tolerance", "Arms whose gain is shown to lie within ±{tolerance} are equivalent."),
    ("q", f"The {Q_LINE}, in each of three families: kernel cells, serving cells, controls (Benjamini-Hochberg)."),
    ("p and limit", "p: how likely fresh pairs as good (or bad) would be, were the gain (or loss) no more than the "
                    "margin. It is proven where p is at most the limit, which follows from q."),
    ("detectable", "The smallest gain or loss that the cell would have proven nine times out of ten, with all pairs of "
                   "a confirmation; empty where they are too few to prove any."),
    ("control, A/A", "A control's backend looks no config up; an A/A cell runs one arm against itself. Neither "
                     "may move."),
    ("launch, pair", "A launch is a fresh process or server; a pair is one of each arm, next to each other in time. "
                     "Both count from 1 in each stage, as in an attempt's stderr.log (the journal counts from 0)."),
)  # fmt: skip

# Abbreviations in the names of metrics -> what they mean.
_METRICS = (
    ("ttft", "Time to the first token of an answer."),
    ("tpot", f"Time per output token after the first: (latency {MINUS} ttft) {_OVER} (tokens {MINUS} 1)."),
    ("itl", "Time between two tokens that follow each other."),
    ("e2e_latency", "Time to the last token of an answer."),
    ("kernel_time_geomean", "Geometric mean, over the batch sizes, of the kernel's median time."),
)


def ways(baseline: str, candidate: str) -> str:
    """Which way round a gain is, in the names of the arms."""
    up, down = f"{candidate} {_OVER} {baseline} {MINUS} 1", f"{baseline} {_OVER} {candidate} {MINUS} 1"
    return f"{up} where higher is better, {down} where lower is"


def gain_line(bundle: RunBundle) -> str:
    """What a gain is, in a line; empty for a run that compares no arms."""
    policy = bundle.plan.compare
    if policy is None:
        return ""
    arms = one_line(policy.baseline, 60), one_line(policy.candidate, 60)
    return f"Gain: how much better {arms[1]} is than {arms[0]}, {ways(*arms)}; +100 % is twice as good."


def interval_line(cells: Iterable[Joined]) -> str:
    """What stands behind a gain, with the confidence that this run's pairs gave; empty where nothing was compared."""
    levels = sorted({(effect.level, effect.pairs) for effect in _effects(cells)})
    if not levels:
        return ""
    ends = dict.fromkeys((levels[0], levels[-1]))
    told = " to ".join(f"{percent(level, 1, sign=False)} ({count(pairs, 'pair')})" for level, pairs in ends)
    return (
        "Behind a gain stands the confidence interval of the gain of a typical pair: 95 %, or the most that so few "
        f"pairs allow; here {told}."
    )


def outcome_lines(cells: Iterable[Joined]) -> tuple[str, ...]:
    """The outcomes of these cells whose words do not say it all, each with its meaning."""
    words = {joined.word for joined in cells}
    return tuple(f"{look.arrow} {look.word}: {look.meaning}." for key, look in LOOKS.items() if key in words & _TOLD)


def reading(bundle: RunBundle, cells: tuple[Joined, ...]) -> tuple[tuple[str, str], ...]:
    """Return (term, what it means) for the terms that the page of these cells uses."""
    rows = _statistics(bundle, cells) if _effects(cells) else []
    words = {joined.word for joined in cells}
    rows += [(f"{look.arrow} {look.word}", _sentence(look.meaning)) for key, look in LOOKS.items() if key in words]
    if any(joined.cell.kind == "accuracy" for joined in cells):
        rows.append(
            ("points", "The gain of an accuracy cell: the candidate's score less the baseline's, in hundredths.")
        )
    if any(joined.blame for joined in cells):
        rows.append(("exit N", "Marks the cells because of which the gate asks for that exit code."))
    return tuple(rows)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _effects(cells: Iterable[Joined]) -> list[Effect]:
    """The effects of what was timed: accuracies have no pairs to count."""
    verdicts = (joined.verdict for joined in cells if joined.cell.kind != "accuracy" and joined.verdict is not None)
    return [verdict.effect for verdict in verdicts if verdict.effect is not None]


def _statistics(bundle: RunBundle, cells: tuple[Joined, ...]) -> list[tuple[str, str]]:
    gate = bundle.plan.gate
    fields = {
        "gain": gain_line(bundle).removeprefix("Gain: "),
        "interval": interval_line(cells),
        "margin": percent(gate.margin, 1, sign=False),
        "tolerance": percent(gate.tolerance, 1, sign=False),
    }
    verdicts = [joined.verdict for joined in cells if joined.verdict is not None]
    metrics = {e.metric for verdict in verdicts for e in (verdict.effect, *verdict.others) if e is not None}
    rows = [(term, words.format(**fields)) for term, words in _TERMS]
    rows += [(name, words) for name, words in _METRICS if any(name in metric for metric in metrics)]
    return [(term, words) for term, words in rows if words]
