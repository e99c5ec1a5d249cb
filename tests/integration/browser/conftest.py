"""A real Chromium, driven over WebDriver with nothing but the standard library, on loopback only."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moegate.records import RunBundle

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
AXE = "axe-core@4.10.3"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_KEYS = {"Escape": "\ue00c", "Enter": "\ue007", "Tab": "\ue004", "Space": " "}


class Browser:
    """One Chromium session; `logs` collects the console and every request that a page makes."""

    def __init__(self, port: int, profile: Path, binary: str) -> None:
        self.base = f"http://127.0.0.1:{port}"
        args = [*_FLAGS, f"--user-data-dir={profile}"]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": args, "binary": binary},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{answer['sessionId']}"

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode(errors='replace')[:800]}") from None

    def do(self, what: str, body: Any = None, method: str = "POST") -> Any:
        """Send a WebDriver command to this session."""
        return self._call(method, self.session + what, ({} if method == "POST" else None) if body is None else body)

    def open(self, url: str) -> None:
        """Load a page, from a blank one, so that a change of the fragment alone loads it too."""
        self.do("/url", {"url": "about:blank"})
        self.logs("performance")
        self.logs("browser")
        self.do("/url", {"url": url})

    def js(self, script: str, *args: Any) -> Any:
        """Run a function body in the page."""
        return self.do("/execute/sync", {"script": script, "args": list(args)})

    def js_async(self, script: str, *args: Any) -> Any:
        """Run a function body that calls its last argument when it is done."""
        return self.do("/execute/async", {"script": script, "args": list(args)})

    def wait(self, script: str, *args: Any) -> None:
        """Wait until a function body in the page gives a true value: what follows a click may come a moment later."""
        deadline = time.monotonic() + 60
        while not self.js(script, *args):
            assert time.monotonic() < deadline, f"never came true: {script}"
            time.sleep(0.02)

    def find(self, css: str) -> str:
        """Return the handle of one element."""
        return str(self.do("/element", {"using": "css selector", "value": css})[_ELEMENT])

    def click(self, css: str) -> None:
        """Click an element as a person would: it must be in view and not covered."""
        self.do(f"/element/{self.find(css)}/click")

    def type(self, css: str, text: str) -> None:
        """Type into an element."""
        self.do(f"/element/{self.find(css)}/value", {"text": text})

    def press(self, key: str) -> None:
        """Press one key, wherever the focus is."""
        value = _KEYS.get(key, key)
        actions = [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        self.do("/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def cdp(self, command: str, **params: Any) -> Any:
        """Send a DevTools command."""
        return self.do("/goog/cdp/execute", {"cmd": command, "params": params})

    def view(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the window's size in CSS pixels and the preferred colour scheme."""
        self.cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.cdp(
            "Emulation.setEmulatedMedia",
            features=[
                {"name": "prefers-color-scheme", "value": scheme},
                {"name": "prefers-reduced-motion", "value": "reduce"},
            ],
        )

    def shot(self, path: Path) -> None:
        """Write what is seen as a PNG."""
        path.write_bytes(base64.b64decode(self.do("/screenshot", method="GET")))

    def logs(self, kind: str) -> list[dict[str, Any]]:
        """Return and forget what was logged: `browser` (console) or `performance` (DevTools events)."""
        return list(self.do("/se/log", {"type": kind}))

    def console(self) -> list[str]:
        """Return console messages of warning level and above."""
        return [e["message"] for e in self.logs("browser") if e["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Return the URLs that were requested since the last call, the page's own included."""
        events = [json.loads(entry["message"])["message"] for entry in self.logs("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def quit(self) -> None:
        """End the session."""
        self.do("", method="DELETE")


def _missing(what: str) -> None:
    message = f"{what} is not installed; fix: apt-get install chromium chromium-driver"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium for the whole session."""
    driver = shutil.which("chromedriver")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if driver is None or binary is None:
        _missing("Chromium or its driver")
    assert driver is not None
    assert binary is not None
    folder = tmp_path_factory.mktemp("profile")
    with (folder / "driver.log").open("wb") as log:
        process = subprocess.Popen(
            [driver, "--port=0", "--allowed-ips=127.0.0.1"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        session = Browser(_port(folder / "driver.log", process), folder / "profile", binary)
        yield session
        session.quit()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _port(log: Path, process: subprocess.Popen[bytes]) -> int:
    """The port that the driver chose: one that we looked up for it could be another's by then."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = re.search(rb"started successfully on port (\d+)", log.read_bytes())
        if found:
            return int(found[1])
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(f"chromedriver does not say its port: {log.read_text()}")


@pytest.fixture(scope="session")
def runs() -> ModuleType:
    """The maker of runs that the unit tests use."""
    from tests.unit.reports import runs

    return runs


@pytest.fixture
def page(tmp_path: Path) -> Callable[[RunBundle], str]:
    """Render a run to a file and return its file:// URL."""
    from reports import html

    def write(bundle: RunBundle) -> str:
        path = tmp_path / "report.html"
        path.write_text(html.render(bundle), encoding="utf-8")
        return path.as_uri()

    return write


@pytest.fixture(scope="session")
def axe_source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, from npm, kept in the ignored cache."""
    cache = Path(__file__).parents[3] / ".cache" / "axe"
    found = cache / f"{AXE}.js"
    if not found.is_file():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("axe-core is not in .cache and npm is not installed; fix: apt-get install npm")
        work = tmp_path_factory.mktemp("axe")
        packed = subprocess.run(
            [npm, "pack", "--silent", AXE], cwd=work, capture_output=True, text=True, timeout=120, check=False
        )
        if packed.returncode:
            pytest.skip(f"axe-core cannot be had from npm: {packed.stderr[-200:]}")
        with tarfile.open(next(work.glob("*.tgz"))) as archive:
            member = archive.extractfile("package/axe.min.js")
            assert member is not None
            cache.mkdir(parents=True, exist_ok=True)
            partial = cache / f"{AXE}.{os.getpid()}"
            partial.write_bytes(member.read())
            partial.replace(found)
    return found.read_text(encoding="utf-8")


@pytest.fixture
def axe(axe_source: str) -> Callable[[Browser], list[Any]]:
    """Run axe-core in the open page and return its serious and critical violations."""

    def run(browser: Browser) -> list[Any]:
        browser.js(axe_source)
        found = browser.js_async(
            "const done = arguments[arguments.length - 1];"
            "axe.run(document, {resultTypes: ['violations']})"
            ".then(r => done(r.violations), e => done([{id: String(e), nodes: []}]))"
        )
        bad = [violation for violation in found if violation.get("impact") in ("serious", "critical", None)]
        return [(v["id"], [(n["target"], n.get("failureSummary")) for n in v["nodes"][:4]]) for v in bad]

    return run
