"""The index of runs: scanned from disk, rendered, served on loopback."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moegate import records
from moegate.errors import InfraError, UsageError
from moegate.locks import FileLock
from moegate.records import RunBundle, RunCard
from orchestrator.browse import FILES, scan, server
from orchestrator.cli import app
from reports import html, index


def write_run(folder: Path, bundle: RunBundle, *, judged: bool = True) -> None:
    """Write what a run directory holds, as far as an index reads it."""
    folder.mkdir(parents=True)
    records.write(folder / "plan.json", bundle.plan)
    if judged:
        records.write(folder / "gate.json", bundle.gate)
        (folder / "report.html").write_text(html.render(bundle))
        (folder / "junit.xml").write_text("<testsuites/>")


@pytest.fixture
def runs(tmp_path: Path, green: RunBundle, red: RunBundle) -> Path:
    """A folder with a passing, a failing, an unfinished and a damaged run, and things that are no runs."""
    root = tmp_path / "runs"
    write_run(root / "cpu-2", green)
    write_run(root / "cpu-3 ä#?", red)
    write_run(root / "cpu-4", green, judged=False)
    write_run(root / "cpu-1", green)
    (root / "cpu-1" / "gate.json").write_text("{")
    (root / "cpu-1" / "secret.txt").write_text("secret")
    (root / "other").mkdir()
    (root / "history.sqlite").write_text("")
    (root / "link").symlink_to(root / "cpu-2")
    return root


def test_scan_reads_every_run_and_nothing_else(runs: Path) -> None:
    cards = {card.folder: card for card in scan(runs)}
    assert set(cards) == {"cpu-1", "cpu-2", "cpu-3 ä#?", "cpu-4"}
    assert (cards["cpu-2"].exit, cards["cpu-3 ä#?"].exit, cards["cpu-4"].exit) == (0, 1, None)
    assert "gate.json" in cards["cpu-1"].problem
    assert cards["cpu-2"].cells == 7


def test_scan_of_one_run_and_of_nothing(runs: Path) -> None:
    (card,) = scan(runs / "cpu-2")
    assert (card.folder, card.exit) == ("", 0)
    with pytest.raises(UsageError, match="not a folder"):
        scan(runs / "absent")


def test_index_links_are_relative_and_quoted(runs: Path) -> None:
    text = index.render(scan(runs), title="runs")
    assert 'href="cpu-2/report.html"' in text
    assert 'href="cpu-3%20%C3%A4%23%3F/report.html"' in text
    assert "cpu-4/report.html" not in text
    assert "1 cell regressed" in text
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text


def test_a_run_that_nobody_works_on_was_interrupted(runs: Path) -> None:
    """What tells is the lock of the run directory, which dies with its holder."""
    said = "It ended before it was judged"
    for name, before in (("cpu-4", "interrupted"), ("cpu-2", "passes")):
        with FileLock(runs / name / "lock"):
            text = index.render(scan(runs / name), title="runs")
            assert 'data-v="running" data-r' in text
            assert said not in text
        text = index.render(scan(runs / name), title="runs")
        assert f'data-v="{before}" data-r' in text
        assert (said in text) == (name == "cpu-4")


def test_index_is_inert() -> None:
    text = "</script><script>x()</script>\x1b[31m\u202e\"onclick='x'{{7*7}}\ud800"
    card = RunCard(text, text, text, text, 3, 0, text, {"regressed": 1}, ("report.html", "junit.xml"), text)
    made = index.render([card], title=text)
    made.encode()
    assert made.count("<script>") == 1
    assert "49" not in made.split("</style>")[1].split("<script>")[0]
    assert "\u202e" not in made
    assert '" onclick' not in made


def test_index_of_no_runs() -> None:
    assert "No run is here yet" in index.render([], title="runs")


@pytest.fixture
def port(runs: Path) -> Iterator[int]:
    """A server of the folder, on a free port."""

    def render(cards: Sequence[RunCard]) -> str:
        return index.render(cards, title="runs")

    with server(runs, 0, render) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.02,))
        thread.start()
        yield int(serving.server_address[1])
        serving.shutdown()
        thread.join()


def get(port: int, path: str, *, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], bytes]:
    """Ask the server without any normalisation of the path."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    headers = {"Host": host} if host else {}
    connection.request(method, path, headers=headers)
    reply = connection.getresponse()
    answer = reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()
    connection.close()
    return answer


def test_server_shows_index_and_reports(port: int) -> None:
    status, headers, body = get(port, "/")
    assert status == 200
    assert b"cpu-2/report.html" in body
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    status, headers, body = get(port, "/cpu-3%20%C3%A4%23%3F/report.html")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"1 cell regressed" in body
    assert get(port, "/cpu-2/plan.json")[0] == 200
    status, headers, body = get(port, "/", method="HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) > 1000


def test_server_sees_a_new_run_without_a_restart(port: int, runs: Path, green: RunBundle) -> None:
    write_run(runs / "cpu-9", green)
    assert b"cpu-9/report.html" in get(port, "/")[2]


@pytest.mark.parametrize(
    "path",
    [
        "/cpu-1/secret.txt",
        "/cpu-2/../cpu-1/secret.txt",
        "/cpu-2/%2e%2e/cpu-1/secret.txt",
        "/..%2f..%2fetc/passwd",
        "//etc/passwd",
        "/cpu-2%2fplan.json",
        "/link/report.html",
        "/other/report.html",
        "/history.sqlite",
        "/cpu-2/report.html/x",
        "/cpu-2/",
        "/%00/report.html",
        f"/{'x' * 3000}/report.html",
        "/plan.json",
    ],
)
def test_server_serves_nothing_else(port: int, path: str) -> None:
    status, _, body = get(port, path)
    assert (status, body) == (404, b"not here\n")


def test_a_folder_that_has_gone_is_said_and_ends_nothing(port: int, runs: Path) -> None:
    runs.rename(runs.with_name("elsewhere"))
    status, _, body = get(port, "/")
    assert (status, b"is not a folder" in body) == (503, True)
    runs.with_name("elsewhere").rename(runs)
    assert get(port, "/")[0] == 200


def test_server_follows_no_link_out_of_a_run(port: int, runs: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.md"
    outside.write_text("secret")
    (runs / "cpu-2" / "summary.md").symlink_to(outside)
    assert get(port, "/cpu-2/summary.md")[0] == 404


def test_server_answers_loopback_names_only(port: int) -> None:
    assert get(port, "/", host=f"localhost:{port}")[0] == 200
    assert get(port, "/", host="rebound.example")[0] == 403
    assert get(port, "/", method="POST")[0] == 501


def test_a_port_in_use_is_infrastructure(port: int, runs: Path) -> None:
    with pytest.raises(InfraError, match="cannot listen"):
        server(runs, port, lambda cards: "")


def test_write_makes_a_static_index(runs: Path) -> None:
    result = CliRunner().invoke(app, ["browse", str(runs), "--write"])
    assert result.exit_code == 0, result.output
    text = (runs / "index.html").read_text()
    assert 'href="cpu-2/report.html"' in text
    for href in ("cpu-2/report.html", "cpu-2/junit.xml"):
        assert (runs / href).is_file()


def test_every_served_file_has_a_harmless_type() -> None:
    assert {kind.split(";")[0] for name, kind in FILES.items() if name != "report.html"} <= {
        "text/xml",
        "text/plain",
        "application/json",
    }
    json.dumps(FILES)
