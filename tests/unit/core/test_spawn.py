"""Children: fresh, bounded, and gone when they should be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from moegate import spawn
from moegate.errors import UsageError


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(check, seconds: float = 60.0) -> bool:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if check():
            return True
        time.sleep(0.02)
    return False


def python(code: str, tmp_path: Path, **options) -> spawn.Finished:  # type: ignore[no-untyped-def]
    return spawn.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=spawn.child_env(),
        stdout=tmp_path / "out",
        stderr=tmp_path / "err",
        **options,
    )


def test_exit_code_and_output_are_kept(tmp_path: Path) -> None:
    done = python("import sys; print('hello'); print('bad', file=sys.stderr); sys.exit(3)", tmp_path)
    assert (done.returncode, done.signal, done.timed_out) == (3, None, False)
    assert (tmp_path / "out").read_text() == "hello\n"
    assert (tmp_path / "err").read_text() == "bad\n"


def test_a_signal_is_reported(tmp_path: Path) -> None:
    assert python("import os; os.abort()", tmp_path).signal == signal.SIGABRT


def test_the_environment_is_small_and_secrets_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    spawn.run(
        [sys.executable, "-c", "import os; print(sorted(os.environ))"],
        cwd=tmp_path,
        env=spawn.child_env({"TRITON_INTERPRET": "1"}),
        stdout=tmp_path / "out",
    )
    text = (tmp_path / "out").read_text()
    assert "TRITON_INTERPRET" in text
    assert "HF_TOKEN" not in text


@pytest.mark.parametrize(("name", "value"), [("", "x"), ("A=B", "x"), ("A", "x\0y")])
def test_impossible_variables_are_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError, match="environment variable"):
        spawn.child_env({name: value})


def test_the_deadline_kills_the_whole_group_even_if_sigterm_is_ignored(tmp_path: Path) -> None:
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    began = time.monotonic()
    done = python(code, tmp_path, timeout_s=3.0)
    assert done.timed_out
    assert time.monotonic() - began < 50
    grandchild = int((tmp_path / "out").read_text())
    assert wait_until(lambda: not alive(grandchild))


def test_a_grandchild_does_not_outlive_a_clean_exit(tmp_path: Path) -> None:
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"
    assert python(code, tmp_path).returncode == 0
    grandchild = int((tmp_path / "out").read_text())
    assert wait_until(lambda: not alive(grandchild))


def test_a_huge_log_is_cut_with_a_mark(tmp_path: Path) -> None:
    code = "import sys\nfor _ in range(200): sys.stdout.write('x' * 100_000)"
    done = python(code, tmp_path, max_log_bytes=1_000_000)
    assert done.truncated
    text = (tmp_path / "out").read_bytes()
    assert text.endswith(spawn.TRUNCATED)
    assert len(text) == 1_000_000 + len(spawn.TRUNCATED)


def test_a_writer_that_escapes_its_group_cannot_hold_us(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'while True: print(1)'], start_new_session=True)\n"
        "print('pid', p.pid, file=sys.stderr, flush=True)\n"
    )
    began = time.monotonic()
    python(code, tmp_path, max_log_bytes=10_000)
    assert time.monotonic() - began < 60
    os.kill(int((tmp_path / "err").read_text().split()[1]), signal.SIGKILL)


def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from moegate import spawn\n"
        "code = 'import time; time.sleep(600)'\n"
        "child = spawn.start([sys.executable, '-c', code], cwd=Path('.'), env=spawn.child_env())\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: not alive(child))


def gone(thread: threading.Thread) -> bool:
    """Whether the system's thread has ended too, which is a moment later."""
    thread.join()
    return not Path(f"/proc/self/task/{thread.native_id}").exists()


SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_a_child_survives_a_thread_that_used_it_and_dies_with_the_one_that_started_it(tmp_path: Path) -> None:
    mine = spawn.start(SLEEP, cwd=tmp_path, env=spawn.child_env())
    others: list[spawn.Child] = []

    def use_and_start() -> None:
        assert mine.poll() is None
        others.append(spawn.start(SLEEP, cwd=tmp_path, env=spawn.child_env()))

    thread = threading.Thread(target=use_and_start)
    thread.start()
    assert wait_until(lambda: gone(thread))
    assert wait_until(lambda: not alive(others[0].pid)), "the rule of this module's first lines has no reason any more"
    assert mine.poll() is None
    assert others[0].wait().signal == signal.SIGKILL
    assert mine.stop().signal == signal.SIGTERM


def test_stop_is_polite_first(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    child = spawn.start([sys.executable, "-c", code], cwd=tmp_path, env=spawn.child_env(), stdout=tmp_path / "out")
    assert wait_until(lambda: (tmp_path / "out").read_text() == "up\n")
    assert child.poll() is None
    assert child.stop().returncode == 7
    assert child.poll() == 7


def test_a_tick_that_raises_ends_the_child(tmp_path: Path) -> None:
    child = spawn.start([sys.executable, "-c", "import time; time.sleep(600)"], cwd=tmp_path, env=spawn.child_env())

    def cancel() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.wait(cancel, tick_s=0.05)
    assert not alive(child.pid)


def test_a_session_is_ended_with_all_its_groups_and_no_other(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "children = [subprocess.Popen(['sleep', '600'], process_group=0) for _ in range(3)]\n"
        "print(*(child.pid for child in children), flush=True); sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", code]
    leader = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    outside = subprocess.Popen(["sleep", "600"])
    try:
        assert leader.stdout is not None
        inside = [int(word) for word in leader.stdout.readline().split()]
        assert all(alive(pid) for pid in inside)
        spawn.end_session(leader.pid)
        assert not any(alive(pid) for pid in [leader.pid, *inside])
        assert alive(outside.pid)
    finally:
        outside.kill()
        outside.wait()
        leader.communicate()
