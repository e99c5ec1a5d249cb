"""`report.html`: order, content, safety of its form, weight."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser

from moegate.records import (
    CellOutcome,
    CellVerdict,
    Comparison,
    Divergence,
    Effect,
    GatePolicy,
    GateResult,
    Measurement,
    Plan,
    RunBundle,
)
from reports import html, summary
from reports.text import percent
from reports.words import LOOKS

VOID = {"meta", "link", "input", "br", "wbr", "img", "hr"}
# End tags that HTML lets an author leave out; the launch table does.
OPTIONAL = {"td", "th", "tr", "thead", "tbody", "li", "p", "option"}


class Document(HTMLParser):
    """Collects what a test asks about and refuses tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        while self.stack[-1] != tag:
            assert self.stack.pop() in OPTIONAL, f"</{tag}> closes nothing"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        if not self.stack or self.stack[-1] not in ("script", "style"):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]


def test_sections_come_in_the_order_of_the_contract(green: RunBundle) -> None:
    text = html.render(green)
    ids = ["verdict", "counts", "changes", "square", "forest", "cells", "missing", "trust", "details"]
    at = [text.index(f'id="{name}"') for name in ids]
    assert at == sorted(at)


def test_verdict_policy_and_interpreter_are_said_in_words(green: RunBundle) -> None:
    words = Document(html.render(green)).words
    assert "✓ Passes" in words
    assert green.gate.sentence in words
    assert "3 to screen, up to 8 fresh to confirm" in words
    assert "no claim about any hardware" in words


def test_no_interpreter_note_where_no_timing_was_interpreted(green: RunBundle) -> None:
    plain = {
        key: tuple(dataclasses.replace(m, interpreter=False) for m in ms) for key, ms in green.measurements.items()
    }
    assert "nterpreter timings" not in html.render(dataclasses.replace(green, measurements=plain))


def test_the_gates_own_word_is_not_printed_twice(green: RunBundle) -> None:
    gate = dataclasses.replace(green.gate, sentence="PASS: 7 cells (2 improved)")
    words = Document(html.render(dataclasses.replace(green, gate=gate))).words
    assert "PASS:" not in words
    assert "7 cells (2 improved)" in words


def test_square_shows_both_backends_prediction_and_interaction(green: RunBundle) -> None:
    text = html.render(green)
    square = text[text.index('id="square"') : text.index('id="forest"')]
    words = Document(square[square.index("<h2") : square.rindex("</section>")]).words
    for shown in ("triton", "auto ran torch", "+64.0 %", "Interaction", "auto is a control"):
        assert shown in words
    assert "<title>Gain from untuned to tuned by backend" in square


def test_a_prediction_that_leaves_the_rest_of_the_step_out_says_so(green: RunBundle) -> None:
    assert "kernel alone" not in html.render(green)
    cells = tuple(
        dataclasses.replace(cell, predicted_whole_step=cell.predicted is not None) for cell in green.comparison.cells
    )
    bound = dataclasses.replace(green, comparison=dataclasses.replace(green.comparison, cells=cells))
    assert "The kernels predict <b>+64.0 % (kernel alone)</b>" in html.render(bound)
    assert "+64.0 % (kernel alone) |" in summary.render(bound)


def test_config_diff_shows_old_and_new_per_batch_size(green: RunBundle) -> None:
    text = html.render(green)
    assert "<s>32</s> <b>128</b>" in text
    assert "was 64" in text
    assert "(exact)" in text
    assert "no file (default)" in text
    assert "MOEGATE_LOG" in text


def test_dispatch_names_the_chain(green: RunBundle) -> None:
    words = Document(html.render(green)).words
    assert "auto on cpu, moegate → torch in both arms" in words
    assert "on cpu only where it is asked for" in words


def test_every_outcome_has_word_and_arrow(red: RunBundle) -> None:
    words = Document(html.render(red)).words
    for key, look in LOOKS.items():
        if key not in ("passed", "moved", "unmoved"):
            assert f"{look.arrow} {look.word}" in words.replace(look.arrow + look.word, f"{look.arrow} {look.word}")


def test_missing_and_quarantined_cells_are_listed_with_reasons(red: RunBundle) -> None:
    text = html.render(red)
    words = Document(text[text.index('<section id="missing"') : text.index('<section id="trust"')]).words
    for shown in ("never started", "BLOCKED", "INFRA_ERROR", "hangs on driver 1.2", "2027-01-31", "serve flaky-moe*"):
        assert shown in words


def test_an_expired_quarantine_gates_again(red: RunBundle) -> None:
    rule = dataclasses.replace(red.plan.gate.quarantine[0], until="2026-01-01")
    policy = dataclasses.replace(red.plan.gate, quarantine=(rule,))
    bundle = dataclasses.replace(red, plan=dataclasses.replace(red.plan, gate=policy))
    assert html.render(red).count('data-v="regressed"') + 1 == html.render(bundle).count('data-v="regressed"')


def test_drill_down_carries_launches_order_command_log_and_cases(green: RunBundle, red: RunBundle) -> None:
    text = html.render(green)
    assert "22 launches in order: AB BA AB | AB BA" in text
    assert "ready after 3.1 s" in text
    assert "3100 MHz, 61 °C" in text
    assert "fused_experts float32 M=33" in text
    tpot = next(cell for cell in green.comparison.cells if cell.predicted is not None).others[0]
    assert tpot.metric == "median_tpot_ms"
    said = f"The kernels predict <b>+64.0 %</b>; measured <b>{percent(tpot.gain)}</b> (median_tpot_ms)"
    assert said in text, "a prediction of TPOT stands beside TPOT, whatever metric gates"
    failing = html.render(red)
    assert "E=8.json:3 num_warps 3" in failing
    assert "2 void, not paired" in failing
    assert re.search(r"[a-z0-9)%]\. About 14 more pairs would settle it", failing)


def test_both_sides_of_an_aa_cell_are_told_apart(green: RunBundle) -> None:
    """Both arms have one name there, which would say nothing of which dot is which."""
    text = html.render(green)
    cell = next(cell for cell in green.plan.cells if cell.aa)
    detail = text[text.index(f'id="c-{cell.id}"') :].split("</article>")[0]
    assert '<i class="key base"></i>untuned as A</span> <span><i class="key cand"></i>untuned as B</span>' in detail
    assert Document(detail.partition(">")[2]).words.count("untuned as") >= 4  # in the table's head as well


def test_what_pairs_a_gain_is_of_is_said_where_it_stands(green: RunBundle) -> None:
    """A confirmation that gave up leaves a gain that pools the screening: more than the fresh pairs showed."""
    one = next(v for v in green.comparison.cells if v.kind == "serve" and v.verdict == "improved")
    assert one.effect is not None
    assert "The gain is of 8 fresh pairs alone." in html.render(green)
    gave_up = dataclasses.replace(
        one,
        verdict="inconclusive",
        reason="confirmation gave up early: the change is not worth the margin",
        effect=dataclasses.replace(one.effect, pairs=5),
        log_ratios_screen=(0.05, 0.05, 0.05),
        log_ratios_confirm=(0.002, 0.002),
    )
    cells = tuple(gave_up if v is one else v for v in green.comparison.cells)
    text = html.render(dataclasses.replace(green, comparison=dataclasses.replace(green.comparison, cells=cells)))
    said = "all 5 pairs, 3 of the screening and 2 fresh"
    assert f"The gain is of {said}; the fresh ones alone give +0.2 %." in text
    assert f'title="{one.effect.metric}, {said}"' in text


def test_the_code_of_each_arm_is_named_with_the_kernels_that_really_ran(green: RunBundle) -> None:
    sha = "0123456789abcdef0123456789abcdef01234567"
    arms = tuple(dataclasses.replace(a, source=sha if a.name == "tuned" else None) for a in green.plan.arms)

    def built(result: Measurement) -> Measurement:
        launches = [
            dataclasses.replace(
                x, proof=x.proof and dataclasses.replace(x.proof, kernel_hash=f"{x.arm}".ljust(64, "0"))
            )
            for x in result.launches
        ]
        return dataclasses.replace(result, launches=tuple(launches))

    measurements = {cell: tuple(map(built, results)) for cell, results in green.measurements.items()}
    plan = dataclasses.replace(green.plan, arms=arms)
    words = Document(html.render(dataclasses.replace(green, plan=plan, measurements=measurements))).words
    assert f"source this checkout {sha}" in words
    assert "kernels that ran moegate untuned00000 moegate tuned0000000" in words


def test_a_cell_that_was_cut_off_is_missing_whatever_its_screen_said(green: RunBundle) -> None:
    cut = next(v.cell for v in green.comparison.cells if v.verdict == "improved")
    outcomes = tuple(dataclasses.replace(o, state="CANCELLED") if o.cell == cut else o for o in green.outcomes)
    words = Document(html.render(dataclasses.replace(green, outcomes=outcomes))).words
    assert "Planned, but without a verdict or a result" in words
    assert "Every planned cell has an answer" not in words


def test_what_was_passed_over_for_one_reason_stands_together_and_what_was_chosen_is_shown(green: RunBundle) -> None:
    names = [f"backend{n}" for n in range(20)]
    chain = (*({"backend": n, "chosen": False, "why": "not on cpu"} for n in names),
             {"backend": "torch", "chosen": True, "why": "runs everywhere"})  # fmt: skip

    def walked(result: Measurement) -> Measurement:
        launches = tuple(
            dataclasses.replace(x, proof=dataclasses.replace(x.proof, chain=chain)) for x in result.launches if x.proof
        )
        return dataclasses.replace(result, launches=launches)

    measurements = {cell: tuple(map(walked, results)) for cell, results in green.measurements.items()}
    words = Document(html.render(dataclasses.replace(green, measurements=measurements))).words
    assert f"{', '.join(names)} passed over: not on cpu torch chosen: runs everywhere" in words


def test_confidence_is_stated(green: RunBundle, red: RunBundle) -> None:
    words = Document(html.render(green)).words
    assert "0 of 1 A/A cell flagged in this run" in words
    longer = Document(html.render(dataclasses.replace(green, aa_before=(1, 99)))).words
    assert (
        "1 of 100 A/A cells flagged with the earlier runs of this history (95 % confidence: a rate of at most 4.7 %)"
        in (longer)
    )
    assert "every one of them a change of" in words
    words = Document(html.render(red)).words
    assert "has no A/A cell (the matrix key aa adds one); 0 of 1 negative control moved" in words


def test_links_lead_somewhere(red: RunBundle, green: RunBundle) -> None:
    for bundle in (red, green):
        document = Document(html.render(bundle))
        ids = document.values("id")
        assert len(ids) == len(set(ids))
        for href in document.values("href"):
            assert href.startswith(("#", "data:image/svg+xml,"))
            if href.startswith("#") and "?" not in href:
                assert href[1:] in ids, href


def test_nothing_is_loaded_and_the_policy_admits_exactly_our_code(green: RunBundle) -> None:
    text = html.render(green)
    document = Document(text)
    policy = next(v for v in document.values("content") if "default-src" in v)
    assert policy.startswith("default-src 'none';")
    for tag in ("script", "style"):
        body = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        assert body is not None
        digest = base64.b64encode(hashlib.sha256(body[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert document.tags["script"] == 1
    assert not {"src", "style", "srcset", "action"} & {name for _, name, _ in document.attributes}
    assert not any(name.startswith("on") for _, name, _ in document.attributes)
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "@import" not in text
    assert "url(" not in text


def test_script_stays_small() -> None:
    assert len(html.inline_asset("report.js")[0].encode()) <= 10_000


def test_accessibility_of_the_form(green: RunBundle) -> None:
    text = html.render(green)
    document = Document(text)
    assert ("html", "lang", "en") in document.attributes
    assert document.tags["h1"] == 1
    assert document.tags["main"] == 1
    svgs = re.findall(r"<svg [^>]*>.{0,40}", text.replace("%3Csvg", ""))
    assert svgs
    for found in svgs:
        assert ('role="img"' in found and "<title>" in found) or 'class="axis"' in found
    scopes = re.findall(r"<th(?![a-z])[^>]*>", text)
    assert all("scope=" in th for th in scopes)
    assert "prefers-color-scheme: dark" in text
    assert "prefers-reduced-motion" in text
    assert "@media print" in text


def test_rendering_is_reproducible(green: RunBundle) -> None:
    assert html.render(green) == html.render(green)


def test_an_empty_run_renders() -> None:
    plan = Plan("none", "m.yaml", "0" * 64, "2026-11-29T00:00:00Z", "0.1.0", (), (), (), (), (), None, GatePolicy())
    bundle = RunBundle(plan, (), {}, Comparison(()), GateResult(3, "NO ANSWER: the plan has no cells", (), {}))
    words = Document(html.render(bundle)).words
    assert "Incomplete" in words
    assert "This run compares no arms." in words
    assert "No cell was compared." in words


def test_a_run_cut_short_renders(green: RunBundle) -> None:
    cut = tuple(CellOutcome(cell.id, "RUNNING") for cell in green.plan.cells[:2])
    bundle = dataclasses.replace(
        green, outcomes=cut, measurements={}, comparison=Comparison(()), gate=GateResult(130, "interrupted", (), {})
    )
    words = Document(html.render(bundle)).words
    assert "Interrupted" in words
    assert words.count("no attempt was made") >= len(green.plan.cells) - 2


def test_the_table_begins_with_what_needs_a_person_and_moved_most(many: Callable[[int], RunBundle]) -> None:
    text = html.render(many(120))
    rows = re.findall(r'<tr data-v="(\w+)" data-r="(\d)" data-k="[\w-]+" data-g="([-\d.e]+)"', text)
    assert len(rows) == 120
    keys = [(int(rank), -abs(float(gain))) for _, rank, gain in rows]
    assert keys == sorted(keys)


def test_a_stage_that_ran_again_replaces_the_earlier_one(green: RunBundle) -> None:
    twice = {**green.measurements, "e0c44f19": green.measurements["e0c44f19"] * 2}
    assert "22 launches in order" in html.render(dataclasses.replace(green, measurements=twice))
    assert "44 launches" not in html.render(dataclasses.replace(green, measurements=twice))


PARTED = Divergence(200, 2, sample="<b>s7", position=3, median_position=4.0, baseline="5", candidate="6")


def test_accuracy_is_told_in_points_and_stays_out_of_the_forest(green: RunBundle) -> None:
    cells = tuple(dataclasses.replace(c, kind="accuracy") if c.id == "e0c44f19" else c for c in green.plan.cells)
    verdicts = tuple(
        dataclasses.replace(v, effect=dataclasses.replace(v.effect, gain=0.0125), divergence=PARTED)  # type: ignore[type-var]
        if v.cell == "e0c44f19"
        else v
        for v in green.comparison.cells
    )
    bundle = dataclasses.replace(
        green,
        plan=dataclasses.replace(green.plan, cells=cells),
        comparison=dataclasses.replace(green.comparison, cells=verdicts),
    )
    text = html.render(bundle)
    forest = text[text.index('<section id="forest"') : text.index('<section id="cells"')]
    assert "+1.25 points" in text
    assert "2 of 200 answers differ, first &lt;b&gt;s7 at token 3: 5 became 6 (median 4)" in text
    assert "#c-e0c44f19" not in forest
    assert "#c-e0c44f19" in html.render(green)[text.index('<section id="forest"') :]


def test_a_batch_size_that_one_arm_never_ran_is_no_change(green: RunBundle) -> None:
    (made,) = green.measurements["e0c44f19"]
    launches = []
    for launch in made.launches:
        assert launch.proof is not None
        kept = tuple(use for use in launch.proof.configs if use.batch_size != 4 or launch.arm == "tuned")
        kept = tuple(
            dataclasses.replace(u, config={k: v for k, v in u.config.items() if k != "num_warps"}) for u in kept
        )
        launches.append(dataclasses.replace(launch, proof=dataclasses.replace(launch.proof, configs=kept)))
    again = (dataclasses.replace(made, launches=tuple(launches)),)
    bundle = dataclasses.replace(green, measurements={"e0c44f19": again})
    words = Document(html.render(bundle)).words
    assert "Batch sizes that only one arm happened to run: 4." in words
    assert "2 batch sizes changed" in words
    assert "GROUP M" in words


def noisy(verdict: CellVerdict) -> Effect:
    assert verdict.effect is not None
    return dataclasses.replace(verdict.effect, gain=0.333, gain_low=-0.026, gain_high=0.606)


def test_a_control_in_the_noise_is_not_said_to_have_held(green: RunBundle) -> None:
    verdicts = tuple(
        dataclasses.replace(v, verdict="inconclusive", detectable=None, effect=noisy(v)) if v.control or v.aa else v
        for v in green.comparison.cells
    )
    comparison = dataclasses.replace(green.comparison, cells=verdicts)
    bundle = dataclasses.replace(green, comparison=comparison)
    text = html.render(bundle)
    words = Document(text).words
    assert text.count('data-v="unmoved"') == 3  # the chip, the control and the A/A cell
    assert "control held" not in words
    span = f"{percent(-0.026)} to +60.6 %"
    assert words.count(f"may have moved by {span}") == 6, "the row, the badge and the sentence of either"
    assert "2 controls and A/A cells were not shown to move, and not shown to stand still either" in words
    assert f"their intervals reach from {span}" in words
    assert "2 cells could have shown none, however large" in words
    table = next(line for line in summary.render(bundle).splitlines() if line.startswith("| ~ not shown to move"))
    assert "may have moved by" in table


def test_a_note_is_shown_once_and_the_machine_by_name(green: RunBundle) -> None:
    plan = dataclasses.replace(green.plan, warnings=("of the plan", "another"))
    bundle = dataclasses.replace(green, plan=plan, notes=("of the plan", "another", "of the run"))
    text = html.render(bundle)
    assert text.count("<li>of the plan</li>") == 1
    words = Document(text).words
    assert words.index("of the plan") < words.index("another") < words.index("of the run")
    head = text[text.index('<section id="verdict"') : text.index('<section id="counts"')]
    assert "AMD EPYC 9654 (cpu:runner-07)" in head


def test_a_control_is_held_or_moved_and_never_improved(green: RunBundle) -> None:
    text = html.render(green)
    assert text.count('data-v="held"') == 3  # the chip, the control and the A/A cell
    assert 'data-v="equivalent"' not in text
    verdicts = tuple(
        dataclasses.replace(v, verdict="improved") if v.cell == "a91b7c30" else v for v in green.comparison.cells
    )
    comparison = dataclasses.replace(green.comparison, cells=verdicts, voided_pools={"cpu": "control improved"})
    words = Document(html.render(dataclasses.replace(green, comparison=comparison))).words
    assert "auto +0.9 % (control moved)" in words
    assert "Pool cpu is void" in words
