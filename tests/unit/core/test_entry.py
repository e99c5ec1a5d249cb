"""What a machine refuses ends each program in one line and an exit code."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moegate.entry import from_os
from moegate.errors import InfraError, UsageError

_RUN = "import sys; from moegate.entry import guard; sys.stdout.isatty(); guard('prog', lambda: {body})"


def ended(body: str, stdout: int | None = subprocess.PIPE, **env: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", _RUN.format(body=body)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=env or None,
    )
    return done.returncode, done.stdout or "", done.stderr


@pytest.mark.parametrize(
    ("number", "name", "kind"),
    [
        (errno.ENAMETOOLONG, "x", UsageError),
        (errno.EACCES, "x", UsageError),
        (errno.EISDIR, "x", UsageError),
        (errno.ENOSPC, "x", InfraError),
        (errno.EROFS, "x", InfraError),
        (errno.EMFILE, None, InfraError),
        (errno.ENOENT, None, InfraError),
    ],
)
def test_a_named_path_is_the_persons_and_the_rest_the_machines(number: int, name: str | None, kind: type) -> None:
    error = from_os(OSError(number, "is refused", name))
    assert type(error) is kind
    assert "is refused" in str(error)


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("open('y' * 300)", 2, "prog: yyy"),
        ("(_ for _ in ()).throw(OSError(28, 'No space left'))", 3, "prog: No space left"),
        (r"(_ for _ in ()).throw(OSError(28, 'No \x1b[2J\nspace'))", 3, "prog: No \\x1b[2J\nspace"),
        ("7", 7, ""),
        ("None", 0, ""),
        ("sys.exit(4)", 4, ""),
        ("(_ for _ in ()).throw(BrokenPipeError(32, 'Broken pipe'))", 3, "prog: Broken pipe"),
        ("(_ for _ in ()).throw(KeyboardInterrupt())", 130, ""),
    ],
)
def test_how_a_program_ends(body: str, code: int, said: str) -> None:
    returned, _, stderr = ended(body)
    assert (returned, "Traceback" in stderr) == (code, False)
    assert stderr.startswith(said)
    assert bool(stderr) == bool(said)


def test_a_defect_still_shows_itself() -> None:
    assert "ZeroDivisionError" in ended("1 / 0")[2]
    assert "RuntimeError: odd" in ended("(_ for _ in ()).throw(RuntimeError('odd'))")[2]


def test_links_in_a_circle_are_the_persons(tmp_path: Path) -> None:
    link = tmp_path / "circle"
    link.symlink_to(link.name)
    body = f"open(__import__('pathlib').Path({str(link)!r}).resolve())"
    assert ended(body) == (2, "", f"prog: {link}: Too many levels of symbolic links\n")


def test_output_that_cannot_be_written_is_the_machines_fault() -> None:
    with Path("/dev/full").open("w") as full:
        returned, _, stderr = ended("print('answer')", stdout=full.fileno())
    assert (returned, stderr) == (3, "prog: No space left on device\n")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("print('said', file=sys.stderr) or 4", 4),
        ("print('said', file=sys.stderr, flush=True)", 0),
        ("[][print('said', file=sys.stderr)]", 1),
        ("open('no/such')", 2),
        ("print('answer', flush=True)", 3),
    ],
)
def test_what_standard_error_cannot_take_leaves_the_exit_code_alone(body: str, code: int) -> None:
    run = [sys.executable, "-c", _RUN.format(body=body)]
    with Path("/dev/full").open("w") as full:
        assert subprocess.run(run, stdout=full, stderr=full).returncode == code


def test_a_name_that_the_terminal_cannot_spell_is_printed_all_the_same() -> None:
    returned, stdout, stderr = ended(r"print('a\udcff\u2026')", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (returned, stdout, stderr) == (0, "a\\udcff\\u2026\n", "")


@pytest.mark.parametrize(
    "argv",
    [
        ("orchestrator", "gate", "x" * 300),
        ("orchestrator", "status", "x" * 300),
        ("tuner", "tune", "--model", "x" * 300, "--out", "tuned"),
        ("serving", "launch", "--model", "x" * 300),
    ],
)
def test_a_name_that_is_too_long_is_exit_2_for_every_program(tmp_path: Path, argv: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-P", "-m", *argv], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "File name too long" in done.stderr or "no such model" in done.stderr
    assert "x" * 300 in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("name", "code", "said"), [("torch.nn", 3, "-e '.[cpu]'"), ("nonsense", 1, "Traceback")])
def test_what_is_not_installed_is_named_with_the_extra_that_brings_it(name: str, code: int, said: str) -> None:
    returned, _, stderr = ended(f"(_ for _ in ()).throw(ModuleNotFoundError('x', name='{name}'))")
    assert returned == code
    assert said in stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_taken_by_no_file_of_ours(tmp_path: Path, closed: str) -> None:
    code = "from moegate.entry import guard; guard('prog', lambda: open('file', 'w').fileno() - 3)"
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code], cwd=tmp_path, timeout=30
    )
    assert done.returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGINT, 130)])
def test_a_signal_unwinds_and_is_the_exit_code(tmp_path: Path, number: int, code: int) -> None:
    body = (
        "import os, signal, sys, time; from moegate.entry import guard, unwind_on_termination\n"
        # These tests may run under nohup, or behind a shell's `&`, where a child inherits ignored signals.
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "unwind_on_termination()\n"
        "def work():\n"
        "    try:\n"
        "        os.kill(os.getpid(), int(sys.argv[1])); time.sleep(60)\n"
        "    finally:\n"
        "        open('cleaned', 'w').close()\n"
        "guard('prog', work)\n"
    )
    done = subprocess.run([sys.executable, "-c", body, str(number)], cwd=tmp_path, timeout=30, capture_output=True)
    assert (done.returncode, b"Traceback" in done.stderr) == (code, False)
    assert (tmp_path / "cleaned").is_file()


def test_the_same_signal_twice_does_not_cut_the_end_short(tmp_path: Path) -> None:
    """`timeout` sends it to the program and to its group."""
    body = (
        "import os, signal, time; from moegate.entry import guard, unwind_on_termination\n"
        "unwind_on_termination()\n"
        "def work():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.1); open('cleaned', 'w').close()\n"
        "guard('prog', work)\n"
    )
    done = subprocess.run([sys.executable, "-c", body], cwd=tmp_path, timeout=30, capture_output=True)
    assert (done.returncode, done.stderr) == (143, b"")
    assert (tmp_path / "cleaned").is_file()


def test_a_signal_that_a_finaliser_swallowed_is_still_known() -> None:
    body = (
        "import os, signal; from moegate.entry import asked_to_end, unwind_on_termination\n"
        "unwind_on_termination()\n"
        "class Gone:\n"
        "    def __del__(self): os.kill(os.getpid(), signal.SIGTERM)\n"
        "Gone(); print(asked_to_end())\n"
    )
    done = subprocess.run([sys.executable, "-c", body], timeout=30, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "143\n")


# A reader that goes at once or after a line, with standard error or without, and both ways that Python buffers.
@pytest.mark.parametrize("reader", ["| true", "| head -1", "2>&1 | true", "2>&1 | head -1"])
@pytest.mark.parametrize("options", ["", "-u"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("code", [0, 1])
def test_a_reader_that_goes_away_changes_neither_the_work_nor_its_code(
    tmp_path: Path, reader: str, options: str, code: int
) -> None:
    (tmp_path / "work.py").write_text(
        "import sys; from moegate.entry import guard\n"
        "def work():\n"
        "    for number in range(20000): print('a line of the answer', number)\n"
        "    for number in range(2000): print('a note', file=sys.stderr)\n"
        "    open('done', 'w').close()\n"
        "    return int(sys.argv[1])\n"
        "guard('prog', work)\n"
    )
    line = f"{sys.executable} {options} work.py {code} {reader}; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == str(code)
    assert set(done.stderr.splitlines()) <= {"a note"}
    assert (tmp_path / "done").is_file()


def test_a_message_that_nobody_reads_leaves_the_code(tmp_path: Path) -> None:
    for words, code in (("plan nowhere.yaml", 2), ("--nonsense", 2), ("schema", 0)):
        line = f"{sys.executable} -P -m orchestrator {words} 2>&1 | true; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == (f"{code}\n", "")


def test_what_nohup_ignores_stays_ignored() -> None:
    body = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from moegate.entry import unwind_on_termination; unwind_on_termination()\n"
        "assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN\n"
    )
    assert subprocess.run([sys.executable, "-c", body], timeout=30).returncode == 0


@pytest.mark.parametrize(("command", "kept"), [("tune", True), ("compare", False)])
def test_only_what_keeps_a_journal_says_that_it_goes_on(command: str, kept: bool) -> None:
    code = (
        "import sys, tuner.cli, tuner.__main__\n"
        "tuner.cli.app = lambda **_: (_ for _ in ()).throw(KeyboardInterrupt())\n"
        "tuner.__main__.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr.startswith("tuner: interrupted")
    assert ("journal" in done.stderr) is kept


@pytest.mark.parametrize("option", ["--emit", "--python"])
def test_an_empty_option_is_not_the_default(tmp_path: Path, option: str) -> None:
    argv = [sys.executable, "-P", "-m", "tuner", "tune", "--out", "tuned", option, ""]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is empty" in done.stderr
