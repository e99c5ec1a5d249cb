"""`report.html` in a real Chromium: seen, sorted, filtered, walked by keyboard, silent on the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from moegate.records import RunBundle

if TYPE_CHECKING:
    from typing import Protocol

    class Browser(Protocol):
        """What `conftest.Browser` offers."""

        def open(self, url: str) -> None: ...
        def wait(self, script: str, *args: Any) -> None: ...
        def js(self, script: str, *args: Any) -> Any: ...
        def click(self, css: str) -> None: ...
        def type(self, css: str, text: str) -> None: ...
        def press(self, key: str) -> None: ...
        def view(self, width: int, height: int, scheme: str = ...) -> None: ...
        def console(self) -> list[str]: ...
        def requests(self) -> list[str]: ...


pytestmark = pytest.mark.browser
Page = Callable[[RunBundle], str]
_VISIBLE = "return [...document.querySelectorAll('#table tbody tr')].filter(r => r.offsetParent)"


@pytest.fixture
def shown(browser: Browser, page: Page, runs: ModuleType) -> Iterator[Browser]:
    """The failing run, open from disk; afterwards the console must be empty and nothing may have been requested."""
    browser.view(1280, 900)
    url = page(runs.make_red())
    browser.open(url)
    yield browser
    assert browser.console() == []
    assert {asked.split("#")[0] for asked in browser.requests()} == {url}


def rows(browser: Browser, column: int = 2) -> list[str]:
    """Text of one column of the rows that can be seen."""
    return list(browser.js(f"{_VISIBLE}.map(r => r.cells[{column - 1}].innerText.trim())"))


def test_verdict_is_on_the_first_screen(shown: Browser) -> None:
    box = shown.js(
        "const h = document.querySelector('h1'), r = h.getBoundingClientRect();"
        "return [h.innerText.trim().split(/\\s+/), r.top > 0 && r.bottom < innerHeight, getComputedStyle(h).visibility]"
    )
    assert box == [["✕", "Fails"], True, "visible"]
    assert shown.js("return document.title") == "✕ Fails: default, moegate"


def test_filter_by_text_outcome_and_kind(shown: Browser) -> None:
    total = len(rows(shown))
    assert total == 13
    shown.type("#q", "triton eager")
    assert [name.startswith("serve tiny-moe triton eager") for name in rows(shown)] == [True]
    assert shown.js("return document.getElementById('shown').textContent") == "1 of 13 cells"
    shown.click("#reset")
    assert len(rows(shown)) == total
    shown.click(".chip[data-v=failed]")
    assert len(rows(shown)) == 4
    shown.click(".chip[data-v=missing]")
    assert len(rows(shown)) == 7
    assert shown.js("return document.querySelector('.chip[data-v=failed]').getAttribute('aria-pressed')") == "true"
    shown.js("const k = document.getElementById('k'); k.value = 'check'; k.dispatchEvent(new Event('change'))")
    assert len(rows(shown)) == 1
    assert shown.js("return location.hash") == "#cells?k=check&v=failed%2Cmissing"


def test_sort_by_keyboard(shown: Browser) -> None:
    shown.js("document.querySelector('th[data-s=g] button').focus()")
    shown.press("Enter")
    assert shown.js("return document.querySelector('th[data-s=g]').getAttribute('aria-sort')") == "descending"
    gains = [text for text in rows(shown, 5) if text]
    assert gains[0].startswith("+5.0 %")
    assert rows(shown, 5)[-1] == ""
    shown.press("Space")
    assert shown.js("return document.querySelector('th[data-s=g]').getAttribute('aria-sort')") == "ascending"
    assert [text for text in rows(shown, 5) if text] == gains[::-1]
    assert rows(shown, 5)[-1] == ""
    shown.js("document.querySelector('th[data-s=n] button').click()")
    names = rows(shown)
    assert names == sorted(names, key=lambda name: name.replace("A", "a"))


def test_permalink_restores_filter_and_sort(shown: Browser, page: Page, runs: ModuleType) -> None:
    url = shown.js("return location.href").split("#")[0]
    shown.open(url + "#cells?v=failed,regressed&s=-n")
    assert [text.split()[0] for text in rows(shown)] == ["serve"] * 4 + ["check"]
    shown.open(url + "#cells?q=%22%3E%3Cimg%20src=x%20onerror=alert(1)%3E")
    assert rows(shown) == []
    assert shown.js("return document.getElementById('q').value") == '"><img src=x onerror=alert(1)>'


def test_tile_filters_the_table(shown: Browser) -> None:
    shown.click(".tile.t-gone")
    shown.wait("return document.getElementById('shown').textContent === '3 of 13 cells'")
    shown.wait("return document.getElementById('cells').getBoundingClientRect().top < innerHeight")


def opened(browser: Browser, title: str | None) -> None:
    """Wait until the drill-down of this cell is open (None: until none is) and the script has seen it."""
    browser.wait(
        "const d = document.querySelector('.detail:target'), t = d ? d.querySelector('h3').textContent : null;"
        "return t === arguments[0] && (!d || d.dataset.ready === '1')",
        title,
    )


def test_drill_down_opens_walks_and_closes(shown: Browser) -> None:
    first, second = "serve tiny-moe triton eager", "check tiny-moe"
    shown.js("document.querySelector('#table a').focus()")
    before = shown.js("return scrollY")
    shown.press("Enter")
    opened(shown, first)
    box = shown.js(
        "const r = document.querySelector('.detail:target').getBoundingClientRect(); return [r.top, r.height, r.right]"
    )
    assert box == [0, 900, 1280]
    assert shown.js("return document.activeElement.classList.contains('detail')")
    shown.click(".detail:target .nav button:nth-child(2)")
    opened(shown, second)
    shown.click(".detail:target .nav button:nth-child(1)")
    opened(shown, first)
    shown.press("Escape")
    opened(shown, None)
    shown.wait("return document.activeElement.matches('#table a')")
    assert abs(shown.js("return scrollY") - before) <= 1


def test_drill_down_of_a_permalink_is_open_at_once(shown: Browser) -> None:
    url = shown.js("return location.href").split("#")[0]
    shown.open(url + "#c-00000006")
    opened(shown, "serve big-moe triton oom")
    assert "Traceback" in shown.js("return document.querySelector('.detail:target .log').textContent")
    shown.click(".detail:target .close")
    opened(shown, None)


def test_config_link_opens_its_set(shown: Browser) -> None:
    url = shown.js("return location.href").split("#")[0]
    shown.js("document.querySelectorAll('.set').forEach(s => s.open = false)")
    shown.open(url + "#c-00000002")
    shown.js("document.querySelectorAll('.set').forEach(s => s.open = false)")
    shown.click(".detail:target a[href^='#cfg-']")
    shown.wait("return document.querySelector('.set').open")


def test_each_command_has_its_copy_button(shown: Browser) -> None:
    shown.js("location.hash = 'c-00000002'")
    opened(shown, "serve tiny-moe triton eager")
    boxes = "[...document.querySelectorAll('.detail:target .cmdbox')]"
    assert shown.js(f"return {boxes}.map(b => b.querySelector('button').textContent)") == ["Copy", "Copy"]
    assert [text.split()[-1] for text in shown.js(f"return {boxes}.map(b => b.querySelector('pre').textContent)")] == [
        "untuned", "tuned",
    ]  # fmt: skip


def test_the_terms_open_from_where_a_gain_stands(shown: Browser) -> None:
    assert not shown.js("return document.getElementById('reading').open")
    shown.click("#cells a[href='#reading']")
    shown.wait("return document.getElementById('reading').open")


def test_the_2x2_does_not_scroll_on_a_wide_screen(browser: Browser, page: Page, runs: ModuleType) -> None:
    """Nor where its words and numbers are as long as those of a control in the noise and of a large gain."""
    green = runs.make_green()
    verdicts = tuple(
        replace(v, verdict="inconclusive" if v.null else v.verdict, predicted_whole_step=v.predicted is not None,
                effect=v.effect and replace(v.effect, gain=2.265, gain_low=2.193, gain_high=2.465))
        for v in green.comparison.cells
    )  # fmt: skip
    browser.view(1280, 900)
    browser.open(page(replace(green, comparison=replace(green.comparison, cells=verdicts))))
    assert "not shown to move" in browser.js("return document.querySelector('#square table').innerText")
    scrolls = "[...document.querySelectorAll('#square .scroll')].map(s => s.scrollWidth - s.clientWidth)"
    assert browser.js(f"return {scrolls}") == [0]


def test_everything_is_reachable_by_keyboard(shown: Browser) -> None:
    shown.press("Tab")
    assert shown.js("return document.activeElement.textContent") == "Skip to the verdict"
    wide = shown.js(
        "return [...document.querySelectorAll('.scroll, pre')].filter("
        "s => s.offsetParent && s.scrollWidth > s.clientWidth && s.tabIndex < 0).length"
    )
    assert wide == 0


def test_narrow_screens_do_not_scroll_sideways(shown: Browser) -> None:
    shown.view(390, 844)
    assert shown.js("return document.documentElement.scrollWidth") == 390
    shown.js("location.hash = 'c-00000002'")
    assert shown.js("return document.querySelector('.detail:target').getBoundingClientRect().width") == 390


def test_the_heads_of_the_arms_do_not_collide(browser: Browser, page: Page, runs: ModuleType) -> None:
    """Measured by what is written, which an element's own box may be narrower than."""
    browser.open(page(runs.make_green()))
    written = (
        "return [...document.querySelectorAll('.arms thead th')].map(th => {"
        "const r = document.createRange(); r.selectNodeContents(th); const b = r.getBoundingClientRect();"
        "return [b.left, b.right, th.getBoundingClientRect().right]})"
    )
    for width in (320, 390, 1280):
        browser.view(width, 900)
        _, (_, end, own), (start, _, _) = browser.js(written)
        assert end <= own + 0.5, width
        assert end < start, width


def test_hostile_text_stays_inert(browser: Browser, page: Page, runs: ModuleType) -> None:
    browser.view(1280, 900)
    text = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=2'>\x1b[31m\u202e{{7*7}}\ud800"
    url = page(runs.make_red(text))
    browser.open(url)
    assert browser.js("return window.pwned === undefined")
    assert browser.js("return document.images.length") == 0
    assert "window.pwned" in browser.js("return document.body.innerText")
    assert len(rows(browser)) == 13
    assert browser.console() == []
    assert {asked.split("#")[0] for asked in browser.requests()} == {url}


def test_300_cells_open_in_a_second(browser: Browser, page: Page, runs: ModuleType) -> None:
    browser.view(1280, 900)
    browser.open(page(runs.make_many(300)))
    timing = browser.js("return performance.getEntriesByType('navigation')[0].toJSON()")
    assert timing["domComplete"] < 1000, timing
    assert len(rows(browser)) == 300
    spent = browser.js(
        "const t = performance.now(); document.querySelector('th[data-s=g] button').click();"
        "document.body.offsetHeight; return performance.now() - t"
    )
    assert spent < 500


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("run", "width"), [("make_green", 1280), ("make_red", 1280), ("make_red", 390)])
def test_axe_finds_no_serious_violation(
    browser: Browser, page: Page, runs: ModuleType, axe: Callable[[Any], list[Any]], scheme: str, run: str, width: int
) -> None:
    browser.view(width, 900, scheme)
    bundle = getattr(runs, run)()
    url = page(bundle)
    for fragment in ("", f"#c-{bundle.plan.cells[1].id}"):
        browser.open(url + fragment)
        browser.js("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert axe(browser) == []


def test_a_long_table_is_laid_out_in_part_and_whole_on_request(browser: Browser, page: Page, runs: ModuleType) -> None:
    browser.view(1280, 900)
    browser.open(page(runs.make_many(1100)))
    assert len(rows(browser)) == 1000
    assert browser.js("return document.getElementById('shown').textContent") == "1100 cells"
    browser.click("#cells > button")
    assert len(rows(browser)) == 1100
