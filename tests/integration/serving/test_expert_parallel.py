"""The server with its experts spread over processes: the same answers, and no hang when one is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
INTERPRET = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
COMMON = ("--slots=2", "--configs=none", "--dtype=float32", "--backend=torch")


def ask(url: str, path: str, body: dict[str, Any] | None = None, timeout: float = 60) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url + path, data, {"content-type": "application/json"}), timeout=timeout
    ) as reply:
        return json.loads(reply.read())


def answer(url: str) -> list[int]:
    body = {"prompt": [5, 9, 200, 31], "max_tokens": 6, "ignore_eos": True, "temperature": 0, "logprobs": 1}
    return [int(token) for token in ask(url, "/v1/completions", body)["choices"][0]["token_ids"]]


def ranks(server: int) -> list[int]:
    """Process ids of the further expert ranks below a server."""
    table = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in table.splitlines()[1:]]
    children = {int(pid) for pid, parent, _ in rows if int(parent) == server}
    return [int(pid) for pid, parent, args in rows if int(parent) in children and "expert_group" in args]


def test_spread_experts_give_the_same_answer(tmp_path: Path, start: Callable[..., Any]) -> None:
    with start(tmp_path, *COMMON, **INTERPRET) as (url, _):
        alone = answer(url)
    (tmp_path / "address").unlink()
    with start(tmp_path, *COMMON, "--ep-size=3", "--ep-parts=2", **INTERPRET) as (url, process):
        assert answer(url) == alone
        assert len(ranks(process.pid)) == 2
        told = ask(url, "/v1/server_info")["expert_parallel"]
        assert (told["size"], told["mode"], told["wire"]) == (3, "fast", "float32")
        assert all(grid["blocks"] <= grid["resident"] for grid in told["grids"])
        assert told["grids"]
        left = ranks(process.pid)
    for pid in left:
        assert not Path(f"/proc/{pid}").exists()


def test_a_killed_rank_ends_the_server_with_a_reason(
    tmp_path: Path, start: Callable[..., Any], until: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []

    def serve_and_kill() -> None:
        with start(tmp_path, *COMMON, "--ep-size=2", **INTERPRET) as (url, process):
            (victim,) = ranks(process.pid)
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(OSError, match=r"."):
                answer(url)
            until(lambda: process.poll() is not None, 30)
            seen.extend([process.returncode, len(ranks(process.pid))])

    with pytest.raises(AssertionError):  # the helper insists on a clean end
        serve_and_kill()
    assert seen == [3, 0]
    said = capfd.readouterr().err
    assert "expert rank" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("options", "env", "message"),
    [
        (("--ep-size=2", "--ep-mode=deterministic"), INTERPRET, "deterministic mode needs backend triton"),
        (("--ep-size=9",), INTERPRET, "9 ranks cannot share 8 experts"),
        (("--ep-size=2", "--graph=full"), INTERPRET, "no graph holds it"),
        (("--ep-size=2",), {}, "TRITON_INTERPRET=1"),
    ],
)
def test_what_cannot_work_is_refused_at_start(
    tmp_path: Path, options: tuple[str, ...], env: dict[str, str], message: str
) -> None:
    model = Path("examples/models/tiny-moe").resolve()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "serving.server", f"--model={model}", *COMMON, *options],
        cwd=tmp_path, env={**clean, **env}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
