"""Errors, exits, canonical JSON, paths, locks and the record codec."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

import pytest

from moegate import canonical, errors, exits, locks, paths, records
from moegate.records import Measurement


def test_the_tree_of_exceptions_is_drawn_in_the_docstring() -> None:
    for name in errors.__all__:
        assert name in (errors.__doc__ or "")
        assert issubclass(getattr(errors, name), errors.MoegateError)


def test_a_usage_error_names_file_line_field_and_cure() -> None:
    error = errors.UsageError("must be positive", file="m.yaml", line=3, field="pools.a.slots", fix="1 or more")
    assert str(error) == "m.yaml:3: pools.a.slots: must be positive (fix: 1 or more)"
    assert error.exit == 2


@pytest.mark.parametrize(
    ("codes", "winner"), [([], 0), ([0, 4], 4), ([4, 3], 3), ([3, 1, 4], 1), ([1, 2], 2), ([2, 130], 130)]
)
def test_precedence_of_exit_codes(codes: list[int], winner: int) -> None:
    assert exits.worst(codes) == winner


def test_reasons_are_ordered_as_the_winner_is_chosen() -> None:
    assert sorted([0, 4, 3, 1, 2, 77], key=exits.rank) == [2, 1, 3, 77, 4, 0]


def test_canonical_json_does_not_depend_on_order_and_refuses_nan() -> None:
    assert canonical.dumps({"b": 1, "a": [1.5, "é"]}) == '{"a":[1.5,"\\u00e9"],"b":1}'
    assert canonical.digest({"a": 1, "b": 2}) == canonical.digest({"b": 2, "a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical.dumps(float("inf"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "a": 2}', "x.json:2: key 'a' appears twice"),
        ('{"a":\n NaN}', "x.json:2: NaN is not a JSON number"),
        ("{", "x.json:1: not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "not JSON"),
        ("[1,\n -1e999]", "x.json:2: -1e999 is larger than any number"),
    ],
)
def test_strict_json(text: str, message: str) -> None:
    with pytest.raises(errors.UsageError, match=message):
        canonical.loads_json(text, file="x.json")


def test_json_that_is_not_utf8_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(errors.UsageError, match="not UTF-8"):
        canonical.load_json(tmp_path / "a.json")
    with pytest.raises(errors.UsageError, match="No such file"):
        canonical.load_json(tmp_path / "b.json")


@pytest.mark.parametrize("name", ["folder", "pipe", "n" * 300, "a\0b"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(errors.UsageError):
        canonical.load_json(tmp_path / name)


def test_a_file_of_the_kernels_is_neither_waited_for_nor_read_for_ever(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="maps: holds more than 100 bytes"):
        canonical.read_file(Path("/proc/self/maps"), 100)
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)  # as /proc/kmsg with nothing to say
    try:
        with pytest.raises(BlockingIOError):
            canonical._read_at_once(tmp_path / "pipe", 10)
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("007", 7), ("64", 64), ("0", None), ("65", None), ("-1", None), ("1_0", None), ("\u0661", None),
     ("", None), ("1.0", None), (" 1", None), ("9" * 5000, None), ("0" * 5000 + "8", 8)],
)  # fmt: skip
def test_only_plain_digits_are_a_number(text: str, value: int | None) -> None:
    assert canonical.whole(text, 1, 64) == value


def test_a_trees_digest_sees_names_and_contents(tmp_path: Path) -> None:
    empty = canonical.tree_digest(tmp_path)
    assert canonical.tree_digest(tmp_path / "missing") == empty
    (tmp_path / "a").write_text("1")
    one = canonical.tree_digest(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert len({empty, one, canonical.tree_digest(tmp_path)}) == 3


def test_write_atomic_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file"
    paths.write_atomic(target, "old")
    with pytest.raises(UnicodeEncodeError):
        paths.write_atomic(target, "\ud800")
    assert target.read_text() == "old"
    assert [path.name for path in target.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127])
def test_the_longest_names_can_be_written(tmp_path: Path, name: str) -> None:
    paths.write_atomic(tmp_path / name, "x")
    assert (tmp_path / name).read_text() == "x"


def test_a_file_without_a_name_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="not the name of a file"):
        paths.write_atomic(Path(), "x")


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # as on a full disk, the write fails, not the opening
    try:
        with pytest.raises(OSError, match="large") as caught:
            paths.write_atomic(tmp_path / "file", "x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.filename == str(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_what_a_file_system_takes_no_part_of_is_named_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    for action in ("open", "unlink"):  # one that is mounted read-only; to mount one takes root
        monkeypatch.setattr(Path, action, refuse)
    with pytest.raises(OSError, match="Read-only") as caught:
        paths.write_atomic(tmp_path / "file", "x")
    assert caught.value.filename == str(tmp_path / "file")


def test_a_folder_is_removed_with_locked_folders_in_it_and_what_links_lead_to_stays(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    (folder / "a" / "b" / "c").mkdir(parents=True)
    other.mkdir(mode=0o750)
    (folder / "a" / "link").symlink_to(other)
    for path in (folder / "a" / "b" / "c", folder / "a" / "b", folder / "a", folder):
        path.chmod(0)
    paths.remove_folder(folder)
    (tmp_path / "link").symlink_to(other)
    paths.remove_folder(tmp_path / "link")
    paths.remove_folder(tmp_path / "nothing")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "other"]
    assert stat.S_IMODE(other.stat().st_mode) == 0o750


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path, words in ((pipe, "no regular file"), (folder, "is a folder")):
        before = path.stat()
        with pytest.raises(errors.UsageError, match=words):
            paths.write_atomic(path, "x")
        assert path.stat().st_ino == before.st_ino
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "/dev/null", "up/dev/stdout"])
def test_a_stream_under_a_redirection_is_no_file_to_replace(tmp_path: Path, name: str) -> None:
    (tmp_path / "up").symlink_to("/")
    code = (
        "import sys; from pathlib import Path; from moegate import errors, paths\n"
        "print('first', flush=True)\n"
        "try: paths.write_atomic(Path(sys.argv[1]), 'x')\n"
        "except errors.UsageError as error: print(error)\n"
    )
    link = Path("/dev/stdout").readlink()
    out = tmp_path / "out"
    with out.open("wb") as stream:
        subprocess.run([sys.executable, "-c", code, name], stdout=stream, check=True, cwd=tmp_path)
    assert out.read_text() == f"first\n{name}: is a device or a stream: name a file\n"
    assert Path("/dev/stdout").readlink() == link


# A command that measures for long, and where its file would go.
RECORDING = [
    ("tuner", "bench", "--shape=E=1", "--out"),
    ("tuner", "verify", "--out"),
    ("tuner", "compile", "--targets=sm_90", "--out"),
    ("tuner", "tune", "--shape=E=1", "--out=tuned", "--result"),
    ("serving", "bench", "--requests=1", "--input=1", "--output=1", "--base-url=http://127.0.0.1:9", "--out"),
    ("serving", "accuracy", "--samples=none", "--base-url=http://127.0.0.1:9", "--out"),
    ("serving", "launch", "--model=none", "--announce"),
    ("serving", "launch", "--model=none", "--server-log"),
]


@pytest.mark.parametrize("words", RECORDING, ids=lambda words: " ".join(words[:2]))
def test_a_command_refuses_such_a_name_before_it_measures(tmp_path: Path, words: tuple[str, ...]) -> None:
    argv = [sys.executable, "-P", "-m", *words[:-1], f"{words[-1]}=/dev/stdout"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(r"/dev/stdout: .*is a device or a stream: name a file", done.stderr), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_is_told_before_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain").write_text("")
    (tmp_path / "circle").symlink_to("circle")
    for name in ("plain", "circle"):
        with pytest.raises(errors.UsageError, match=f"{name}: is no folder"):
            paths.ensure_writable(tmp_path / name / "deep" / "file")
    with pytest.raises(errors.UsageError, match="not the name of a file"):
        paths.ensure_writable(tmp_path / "missing" / "..")
    assert paths.ensure_writable(tmp_path / "missing" / "deep" / "file") == tmp_path / "missing" / "deep" / "file"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    with pytest.raises(errors.UsageError, match=f"{tmp_path.name}: cannot be written to"):
        paths.ensure_writable(tmp_path / "missing" / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["circle", "plain"]


def test_links_in_a_circle_are_what_the_system_says_of_them(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="circle"):
        paths.write_atomic(tmp_path / "circle" / "file", "x")


def test_a_link_is_replaced_and_what_it_led_to_stays(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    paths.write_atomic(tmp_path / "link", "new")
    assert (tmp_path / "real").read_text() == "old"
    assert not (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("look", [paths.is_file, paths.is_folder, paths.exists])
def test_a_name_that_the_system_refuses_to_look_at_is_nothing(
    tmp_path: Path, look: Callable[[Path], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    assert [look(tmp_path), look(tmp_path / "file")] == [look is not paths.is_file, look is not paths.is_folder]
    (tmp_path / "circle").symlink_to("circle")
    for name in ("x" * 300, "/".join("x" * 200 for _ in range(30)), "a\0b", "file/below", "circle", "none"):
        assert not look(tmp_path / name)

    def refuse(path: object, *args: object, **more: object) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", refuse)  # root may look everywhere
    assert not look(tmp_path)


def test_a_name_that_cannot_be_one_leads_nowhere(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match=r"'a\\x00b' is no name of a file"):
        paths.ensure_inside(tmp_path, Path("a\0b"))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x"])
def test_nothing_leads_outside(tmp_path: Path, name: str) -> None:
    with pytest.raises(errors.UsageError, match="outside"):
        paths.ensure_inside(tmp_path / "root", Path(name))


def test_the_shipped_configs_are_found() -> None:
    assert paths.config_root().name in ("configs", "_configs")


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from moegate.locks import FileLock\n"
        "FileLock(Path(sys.argv[1])).acquire(); print('held', flush=True); sys.stdin.read()"
    )
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(locks.Held, match=str(holder.pid)):
            locks.FileLock(path).acquire()
        holder.kill()
        holder.wait()
        with locks.FileLock(path):
            assert json.loads(path.read_text())["pid"]


def test_a_lock_holds_on_a_full_disk(tmp_path: Path) -> None:
    """What it says of its holder is for people; who may write is decided without it."""
    code = (
        "import resource, sys; from pathlib import Path; from moegate.locks import FileLock, Held\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); path = Path(sys.argv[1])\n"
        "with FileLock(path):\n"
        "    try: FileLock(path).acquire()\n"
        "    except Held as held: print(held.holder)"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "lock")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("another process\n", "")


def test_a_recycled_process_number_in_a_lock_holds_nothing(tmp_path: Path) -> None:
    """The file names a process that lives and has never heard of it."""
    path = tmp_path / "lock"
    path.write_text(json.dumps({"pid": os.getppid()}))
    with locks.FileLock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_child_that_outlives_its_parent_does_not_inherit_its_lock(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; from pathlib import Path; from moegate.locks import FileLock\n"
        "FileLock(Path(sys.argv[1])).acquire()\n"
        "quiet = dict.fromkeys(('stdout', 'stderr'), subprocess.DEVNULL)  # a pipe that it holds would be waited for\n"
        "print(subprocess.Popen(['sleep', '60'], close_fds=False, **quiet).pid)\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "lock")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    child = int(done.stdout)
    try:
        assert Path(f"/proc/{child}/comm").read_text() == "sleep\n"
        locks.FileLock(tmp_path / "lock").acquire().release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_device_lock_cannot_leave_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGATE_LOCK_DIR", str(tmp_path))
    assert locks.device_lock("../../0000:03:00.0").path.parent == tmp_path


def measurement() -> Measurement:
    device = records.DeviceIdentity("cpu", "cpu", "cpu:host")
    samples = records.Samples("kernel_time", "us", "lower", (1.0, 2.5), primary=True)
    proof = records.Proof("moegate", "auto", "torch", configs=(records.ConfigUse("op", "up", 1, None, "default", {}),))
    launch = records.Launch(device, "2026-01-01T00:00:00+00:00", 1.0, (samples,), proof, arm="tuned", stage="screen")
    return Measurement("serve", "ok", device, {"torch": "2.13.0"}, {"requests": 2}, (launch,))


def test_records_survive_the_trip_through_json(tmp_path: Path) -> None:
    record = measurement()
    records.write(tmp_path / "result.json", record)
    assert records.read(Measurement, tmp_path / "result.json") == record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema 2 is not 1"),
        ({"extra": 1}, "unknown field 'extra'"),
        ({"status": "fine"}, "status: is 'fine'; must be one of"),
        ({"work": {"requests": True}}, "work.requests: must be int, not bool"),
        ({"launches": [{}]}, r"launches\[0\].device: is missing"),
        ({"device": None}, "device: must be an object, not null"),
    ],
)
def test_what_a_record_does_not_know_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(errors.RecordError, match=message):
        records.from_json(Measurement, records.to_json(measurement()) | change, file="result.json")


def test_a_number_beyond_any_float_is_refused() -> None:
    body = records.to_json(measurement())
    body["launches"][0]["wall_s"] = 10**400
    with pytest.raises(errors.RecordError, match="must be finite"):
        records.from_json(Measurement, body)


def test_a_record_with_a_missing_field_names_it() -> None:
    body = records.to_json(measurement())
    for field in fields(Measurement):
        if field.name in ("kind", "status", "device", "environment", "work"):
            cut = {key: value for key, value in body.items() if key != field.name}
            with pytest.raises(errors.RecordError, match=f"{field.name}: is missing"):
                records.from_json(Measurement, cut)


def test_the_core_imports_nothing_heavy() -> None:
    code = "import sys, moegate.records, moegate.journal, moegate.spawn, moegate.locks; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("torch", "triton", "ray", "numpy", "scipy", "pydantic"):
        assert f"'{heavy}'" not in loaded


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
@pytest.mark.parametrize("mode", [0o666, 0o644], ids=["ours", "older"])
def test_users_of_one_host_share_a_device_lock(monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    """Root makes the lock; another user finds it held, and takes it once it is free."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        monkeypatch.setenv("MOEGATE_LOCK_DIR", f"{name}/locks")
        before = os.umask(0o077)
        try:
            lock = locks.device_lock("GPU-1").acquire()
        finally:
            os.umask(before)
        lock.path.chmod(mode)
        assert _as_nobody(lambda: locks.device_lock("GPU-1").acquire()) == f"Held {os.getpid()}"
        lock.release()
        assert _as_nobody(lambda: locks.device_lock("GPU-1").acquire()) == "taken"
        assert _as_nobody(lambda: locks.device_lock("GPU-2").acquire()) == "taken"
        assert locks.device_lock("GPU-2").acquire().path.exists()


def _as_nobody(take: Callable[[], object]) -> str:
    """What a forked child that gave up root says of `take`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            take()
            said = "taken"
        except locks.Held as held:
            said = f"Held {json.loads(held.holder)['pid']}"
        except BaseException as error:
            said = repr(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as stream:
        return stream.read()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('{"pid": 7, "since": "T", "run": "/a/run"}', "process 7, running since T, for the run /a/run"),
        ('{"pid": 7}', "process 7"),
        ("another process", "another process"),
        ('{"pid": null}', '{"pid": null}'),
        ("[]", "[]"),
    ],
)
def test_a_holder_is_said_in_words(written: str, said: str) -> None:
    assert locks.spoken(written) == said
