"""Text that wants to be more than text, planted in every field that can carry it, stays text in every output."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from moegate.records import RunBundle
from moegate.records.findings import Finding, RuleText
from reports import html, junit, sarif, summary

MARK = "zqx"
TEXTS = {
    "script": f"</script><script>{MARK}()</script><img src=x onerror={MARK}()>",
    "attribute": f'" onmouseover="{MARK}()" x=\'',
    "style": f"</style><style>body{{display:none}}</style>{MARK}",
    "svg": f"</title></svg><svg onload={MARK}()>",
    "template": f"{{{{7*7}}}}{{% raw %}}${{7*7}}{MARK}",
    "command": f"\n::error::{MARK}\n::set-output name=x::y\n##[error]{MARK}\n::add-mask::a",
    "ansi": f"\x1b[31m{MARK}\x1b[0m\x1b]8;;http://evil.example\x07x\x07\x9b2J\x00\x08",
    "bidi": f"{MARK}\u202etxt.exe\u2066\u2069\u200f\u061c",
    "surrogate": f"{MARK}\ud800\udfff\ufffe",
    "markdown": f"| {MARK} | [x](javascript:alert(1)) ![i](http://evil.example/i.png) <b> `c` @all #1 www.evil.example",
    "cdata": f"]]>&lt;!--{MARK}--><!DOCTYPE x [<!ENTITY e SYSTEM 'file:///etc/passwd'>]>&e;",
    "long": f"{MARK} " + "A" * 1_000_000,
    "lines": f"{MARK}\n" * 20_000,
}
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Tags(HTMLParser):
    """Counts elements and collects attribute names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.scripts = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.scripts += tag in ("script", "style")
        self.attributes |= {name for name, _ in attrs}
        for name, value in attrs:
            if name == "href":
                assert (value or "").startswith(("#", "data:image/svg+xml,"))


@pytest.fixture(scope="module", params=TEXTS, ids=list(TEXTS))
def planted(request: pytest.FixtureRequest, hostile: Callable[[str], RunBundle]) -> RunBundle:
    """The failing run with one hostile text in every field."""
    return hostile(TEXTS[request.param])


def test_html_is_inert(planted: RunBundle, red: RunBundle) -> None:
    text = html.render(planted)
    text.encode("utf-8")
    assert MARK in text
    assert FORBIDDEN.search(text) is None
    tags, calm = Tags(text), Tags(html.render(red))
    assert tags.scripts == 2
    assert tags.names <= calm.names | {"wbr"}
    assert tags.attributes <= calm.attributes
    assert "${49}" not in text
    assert len(text.encode()) < 1_500_000


def test_template_syntax_is_printed_and_not_run(hostile: Callable[[str], RunBundle]) -> None:
    text = html.render(hostile("{{7*7}}"))
    assert "{{7*7}}" in text
    assert "default49" not in text


def test_junit_is_well_formed_and_short(planted: RunBundle) -> None:
    text = junit.render(planted)
    assert FORBIDDEN.search(text) is None
    assert "<!DOCTYPE" not in text
    root = ET.fromstring(text.encode())
    assert root.get("tests") == str(len(planted.plan.cells))
    assert MARK in text
    assert len(text) < 400_000


def test_summary_is_inert_markdown(planted: RunBundle) -> None:
    text = summary.render(planted)
    assert FORBIDDEN.search(text) is None
    assert len(text.encode()) <= summary.MAX_BYTES
    assert MARK in text
    tags = re.findall(r"<[^>]*>", text)
    assert set(tags) <= {"<details>", "<summary>", "</summary>", "</details>"}
    assert "](" not in text
    assert "##[" not in text
    assert "@" not in text
    assert "http" not in text.replace("http&#58;", "")
    assert not any(line.lstrip().startswith("::") for line in text.splitlines())


def test_annotations_are_single_commands(planted: RunBundle) -> None:
    for line in summary.annotate(planted):
        assert "\n" not in line
        assert re.fullmatch(r"::(error|warning) title=[^:]*::.*", line)
        assert "##[" not in line
        assert len(line) < 1200


def test_sarif_is_ascii_json_with_safe_uris(planted: RunBundle) -> None:
    text = sarif.render(planted)
    assert text.isascii()
    run = json.loads(text)["runs"][0]
    assert run["results"]
    for result in run["results"]:
        assert FORBIDDEN.search(result["message"]["text"]) is None
        assert len(result["message"]["text"]) <= 1000
        uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert re.fullmatch(r"[A-Za-z0-9_.~/%-]+", uri)


@pytest.mark.parametrize("text", TEXTS.values(), ids=list(TEXTS))
def test_findings_are_inert(text: str) -> None:
    finding = Finding("bad-value", "error", f"configs/E=8{text}.json", 3, f"num_warps{text}", f"use 4{text}")
    rule = RuleText("bad-value", "error", f"why{text}", f"fix{text}", "https://example.org/docs")
    made = sarif.from_findings([finding], [rule])
    assert made.isascii()
    assert len(made) < 40_000
    (line,) = summary.annotate_findings([finding])
    assert "\n" not in line
    assert re.fullmatch(r"::error file=[^:,]*,line=3,title=bad-value::.*", line)
