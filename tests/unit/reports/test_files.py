"""JUnit, SARIF, the job summary and annotations."""

from __future__ import annotations

import dataclasses
import json
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from moegate.records import GateReason, Launch, RunBundle
from moegate.records.findings import Finding, RuleText
from reports import junit, sarif, summary

FILE = "configs/triton_3_8_0/E=8,N=64,device_name=cpu,dtype=float32.json"


def cases(bundle: RunBundle) -> dict[str, ET.Element]:
    """Test cases by their cell's id."""
    root = ET.fromstring(junit.render(bundle))
    return {case.find("properties/property[@name='id']").get("value"): case for case in root.iter("testcase")}  # type: ignore[union-attr, misc]


def test_junit_has_one_case_per_cell(red: RunBundle) -> None:
    found = cases(red)
    assert set(found) == {cell.id for cell in red.plan.cells}
    assert found["00000002"].get("classname") == "cpu.serve"


@pytest.mark.parametrize(
    ("cell", "element", "kind"),
    [
        ("00000001", "failure", "FAILED"),
        ("00000002", "failure", "regressed"),
        ("00000006", "failure", "OOM"),
        ("00000009", "error", "INFRA_ERROR"),
        ("00000011", "error", "PLANNED"),
    ],
)
def test_junit_names_verdict_or_state(red: RunBundle, cell: str, element: str, kind: str) -> None:
    (found,) = [child for child in cases(red)[cell] if child.tag in ("failure", "error", "skipped")]
    assert (found.tag, found.get("type")) == (element, kind)


def test_junit_skips_quarantined_and_passes_the_rest(red: RunBundle) -> None:
    found = cases(red)
    assert found["00000012"].find("skipped") is not None
    assert "hangs on driver" in found["00000013"].find("skipped").get("message", "")  # type: ignore[union-attr]
    for passing in ("00000003", "00000004", "00000005"):
        assert [child.tag for child in found[passing]] == ["properties"]


def test_junit_fails_what_the_gate_fails(red: RunBundle) -> None:
    """An equivalent or inconclusive cell that the policy refuses is a failure, whatever its verdict."""
    reasons = (GateReason(4, "required, but inconclusive", "00000004"), GateReason(1, "expected improved", "00000003"))
    found = cases(dataclasses.replace(red, gate=dataclasses.replace(red.gate, reasons=reasons)))
    assert found["00000004"].find("failure").get("type") == "inconclusive"  # type: ignore[union-attr]
    assert found["00000003"].find("failure").get("message") == "expected improved"  # type: ignore[union-attr]


def test_junit_says_how_each_arm_is_reproduced_and_in_what_unit(red: RunBundle) -> None:
    found = cases(red)["00000002"]
    body = found.findtext("failure") or ""
    assert [line for line in body.split("\n") if line.startswith("reproduce")] == [
        "reproduce untuned: tuner bench '00000002' untuned",
        "reproduce tuned: tuner bench '00000002' tuned",
    ]
    numbers = {p.get("name"): p.get("value") for p in found.iter("property")}
    assert (numbers["metric"], numbers["unit"], numbers["better"]) == ("output_throughput", "tok/s", "higher")
    assert float(numbers["candidate"] or 0) < float(numbers["baseline"] or 0)


def test_sarif_names_the_arms_and_which_way_is_better(red: RunBundle) -> None:
    results = json.loads(sarif.render(red))["runs"][0]["results"]
    said = next(r["message"]["text"] for r in results if r["ruleId"] == "regressed")
    assert "output_throughput of tuned against untuned: gain \N{MINUS SIGN}" in said
    assert said.endswith(" pairs; higher is better)")


def test_junit_counts_agree_with_its_cases(red: RunBundle) -> None:
    root = ET.fromstring(junit.render(red))
    suite = root.find("testsuite")
    assert suite is not None
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert int(suite.get(attribute, "-1")) == len(list(suite.iter(tag)))


def test_junit_properties_carry_the_numbers(red: RunBundle) -> None:
    found = {p.get("name"): p.get("value") for p in cases(red)["00000002"].iter("property")}
    assert found["verdict"] == "regressed"
    assert found["device"] == "cpu:runner-07"
    assert 0.8 < float(found["ratio"] or 0) < 0.95
    assert {"gain", "ratio_low", "ratio_high", "pairs", "p", "detectable"} <= set(found)


def test_sarif_stands_on_the_config_line_that_regressed(red: RunBundle) -> None:
    run = json.loads(sarif.render(red))["runs"][0]
    regressed = [result for result in run["results"] if result["ruleId"] == "regressed"]
    places = {
        (p["artifactLocation"]["uri"], p["region"]["startLine"])
        for result in regressed
        for p in (location["physicalLocation"] for location in result["locations"])
    }
    written = json.dumps(red.config_files[FILE], indent=4).splitlines()
    lines = {line for uri, line in places if uri.endswith("float32.json") and "_down" not in uri}
    assert {written[line - 1].strip() for line in lines} == {'"1": {', '"2": {', '"4": {'}


def test_sarif_reads_the_line_from_the_checkout(red: RunBundle, tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.parent.mkdir(parents=True)
    path.write_text('{\n\n\n"1": {}, \n"2": {},\n\n"4": {}\n}\n')
    results = json.loads(sarif.render(red, root=tmp_path))["runs"][0]["results"]
    lines = {
        r["locations"][0]["physicalLocation"]["region"]["startLine"]
        for r in results
        if r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].endswith("float32.json")
    }
    assert lines == {4, 5, 7}


def test_sarif_looks_up_few_of_many_entries_and_reads_each_file_once(
    red: RunBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regressed = {v.cell for v in red.comparison.cells if v.verdict == "regressed"}
    read: list[str] = []
    text = sarif._text

    def noted(bundle: RunBundle, root: Path | None, path: str | None, file: str) -> str:
        read.append(file)
        return text(bundle, root, path, file)

    monkeypatch.setattr(sarif, "_text", noted)

    def many(launch: Launch) -> Launch:
        assert launch.proof is not None
        use = launch.proof.configs[0]
        side = 1 if launch.arm == "tuned" else 2
        uses = tuple(
            dataclasses.replace(use, batch_size=n, file=FILE, config={"num_warps": side}) for n in range(1, 5_000)
        )
        return dataclasses.replace(launch, proof=dataclasses.replace(launch.proof, configs=uses))

    measurements = dict(red.measurements)
    for cell in regressed:
        measurements[cell] = tuple(
            dataclasses.replace(m, launches=tuple(map(many, m.launches))) for m in measurements[cell]
        )
    began = time.process_time()
    sarif.render(dataclasses.replace(red, measurements=measurements), root=tmp_path)
    assert set(read) == {FILE}
    assert len(read) <= len(regressed)
    assert time.process_time() - began < 20.0


def test_lines_of_a_long_file_are_counted_once() -> None:
    text = "{\n" + "\n".join(f'"{n}": {{}},' for n in range(100_000)) + "\n}"
    began = time.process_time()
    entries = sarif._entries(text)
    assert (entries[0], entries[99_999], sarif._line(entries, 10**9), sarif._line({}, 1)) == (2, 100_001, 100_001, 1)
    assert time.process_time() - began < 10.0


def test_sarif_of_a_tree_that_no_folder_can_be_names_the_files_as_they_were_said(
    red: RunBundle, tmp_path: Path
) -> None:
    arms = tuple(dataclasses.replace(a, configs="/" + "x" * 300) for a in red.plan.arms)
    bundle = dataclasses.replace(red, plan=dataclasses.replace(red.plan, arms=arms))
    assert sarif.render(bundle, root=tmp_path).count("float32.json") == sarif.render(bundle).count("float32.json") > 0


def test_sarif_finds_the_file_in_the_tree_of_the_candidate(red: RunBundle, tmp_path: Path) -> None:
    path = tmp_path / "tuned" / FILE
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(red.config_files[FILE], indent=2))
    arms = tuple(
        dataclasses.replace(a, configs=str(tmp_path / "tuned")) if a.name == "tuned" else a for a in red.plan.arms
    )
    bundle = dataclasses.replace(red, plan=dataclasses.replace(red.plan, arms=arms))
    results = json.loads(sarif.render(bundle, root=tmp_path))["runs"][0]["results"]
    uris = {r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in results}
    assert any(uri.startswith("tuned/configs/triton_3_8_0/E%3D8") for uri in uris)
    assert not any(uri.startswith("/") for uri in uris)


def test_sarif_structure(red: RunBundle) -> None:
    log = json.loads(sarif.render(red))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert run["tool"]["driver"]["name"] == "moegate"
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
        assert result["locations"][0]["physicalLocation"]["region"]["startLine"] >= 1
        assert len(result["partialFingerprints"]["moegate/v1"]) == 32
    assert {"regressed", "failed", "missing"} == {result["ruleId"] for result in run["results"]}


def test_sarif_of_a_passing_run_is_empty(green: RunBundle) -> None:
    assert json.loads(sarif.render(green))["runs"][0]["results"] == []


def test_sarif_from_findings(tmp_path: Path) -> None:
    findings = [
        Finding("unsorted-keys", "warning", str(tmp_path / "configs/a b.json"), 2, "keys are not sorted", "sort them"),
        Finding("bad-value", "error", "configs/E=8,N=64.json", 7, "num_warps is 3", "a power of two"),
    ]
    rules = [
        RuleText("bad-value", "error", "A value no kernel takes.", "Use one that it takes.", "https://example.org/x")
    ]
    run = json.loads(sarif.from_findings(findings, rules, version="0.1.0", base=tmp_path))["runs"][0]
    first, second = run["results"]
    assert (first["ruleId"], first["level"]) == ("bad-value", "error")
    assert first["message"]["text"] == "num_warps is 3 (fix: a power of two)"
    assert second["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "configs/a%20b.json"
    made = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    assert made["bad-value"]["helpUri"] == "https://example.org/x"
    assert made["bad-value"]["name"] == "BadValue"


def test_sarif_keeps_errors_within_githubs_limit() -> None:
    rows = [Finding("unsorted-keys", "warning", "a.json", n, "m", "f") for n in range(1, 6000)]
    rows.append(Finding("bad-value", "error", "b.json", 1, "m", "f"))
    results = json.loads(sarif.from_findings(rows))["runs"][0]["results"]
    assert len(results) == sarif.MAX_RESULTS
    assert results[0]["level"] == "error"


def test_summary_starts_with_the_verdict(red: RunBundle, green: RunBundle) -> None:
    lines = summary.render(red).splitlines()
    assert lines[0] == "## moegate: default ❌ fails"
    assert lines[2] == f"**{red.gate.sentence}**"
    text = summary.render(green)
    assert "no claim about any hardware" in text
    assert "| triton | 4.100 tok/s |" in text
    assert "| backend | untuned output&#95;throughput | tuned output&#95;throughput | gain (interval) |" in text
    assert "tuned ÷ untuned \N{MINUS SIGN} 1 where higher is better" in text
    assert "confidence interval of the gain of a typical pair" in text
    assert "+64.0 %" in text


def test_summary_names_what_decided(red: RunBundle) -> None:
    text = summary.render(red)
    assert "- **serve tiny-moe triton eager** output&#95;throughput fell by 11.3 %" in text


def test_summary_of_a_large_run_fits(many: Callable[[int], RunBundle]) -> None:
    bundle = many(400)
    cells = tuple(dataclasses.replace(c, label=c.label + " x" * 5000) for c in bundle.plan.cells)
    reasons = tuple(GateReason(1, "y " * 5000, c.id) for c in cells)
    plan = dataclasses.replace(bundle.plan, cells=cells * 20)
    gate = dataclasses.replace(bundle.gate, reasons=reasons)
    text = summary.render(dataclasses.replace(bundle, plan=plan, gate=gate))
    assert len(text.encode()) <= 1024 * 1024
    assert "more cells are in `report.html`" in text


def test_annotations_stay_within_ten_and_ten(red: RunBundle) -> None:
    reasons = tuple(GateReason(exit_, f"reason {n}", "00000002") for exit_ in (1, 4) for n in range(30))
    lines = summary.annotate(dataclasses.replace(red, gate=dataclasses.replace(red.gate, reasons=reasons)))
    assert sum(line.startswith("::error ") for line in lines) == 10
    assert sum(line.startswith("::warning ") for line in lines) == 10


def test_annotation_escapes() -> None:
    (line,) = summary.annotate_findings([Finding("r", "note", "a,b:c%.json", 4, "50 % of\nx", "")])
    assert line == "::notice file=a%2Cb%3Ac%25.json,line=4,title=r::50 %25 of x"
