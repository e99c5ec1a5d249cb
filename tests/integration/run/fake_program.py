"""Stands for tuner, serving and `orchestrator check` in scheduler tests: same command lines, same files, no torch.

Started as a real child by the real scheduler. What it does can be bent by variables of an arm or image: FAKE (a word),
FAKE_ONLY (`command=word`), FAKE_SLEEP (seconds), FAKE_HOLD (a file: go on when it is gone) and FAKE_AWAIT (a lock: go
on when somebody has it, or `over` lies beside it).
"""

import fcntl
import hashlib
import json
import os
import sys
import time
from pathlib import Path

DEVICE = {"kind": "cpu", "name": "fake", "identity": "cpu:fake", "arch": "cpu", "driver": "", "memory_bytes": 0}
if "ZE_AFFINITY_MASK" in os.environ:  # a simulated card: the one that the mask leaves visible
    number = int(os.environ["ZE_AFFINITY_MASK"]) + 1 + (os.environ.get("FAKE") == "wrong-card")
    DEVICE |= {"kind": "xpu", "name": "Intel(R) Arc(TM) Pro B60 Graphics", "identity": f"0000:0{number}:00.0"}
elif "CUDA_VISIBLE_DEVICES" in os.environ:
    DEVICE |= {"kind": "cuda", "name": "NVIDIA H200", "identity": os.environ["CUDA_VISIBLE_DEVICES"]}
elif "HIP_VISIBLE_DEVICES" in os.environ:
    number = int(os.environ["HIP_VISIBLE_DEVICES"]) + 5
    DEVICE |= {"kind": "rocm", "name": "AMD Instinct MI300X", "identity": f"0000:{number:02x}:00.0"}


def option(argv, name, default=None):
    return next((arg.split("=", 1)[1] for arg in argv if arg.startswith(f"--{name}=")), default)


def tree_digest(root):
    rows = []
    for path in sorted(Path(root).rglob("*")):
        if path.is_file():
            rows.append([path.relative_to(root).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()])
    return hashlib.sha256(json.dumps(rows, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write(path, kind, launches=(), cases=(), work=None, **more):
    body = {
        "kind": kind, "status": "ok", "device": DEVICE, "environment": {"fake": "1"}, "work": work or {"things": 1},
        "launches": list(launches), "cases": list(cases), "outputs": {}, "interpreter": True, "failure": None,
        "detail": {}, "schema": 1, **more,
    }  # fmt: skip
    path = Path(path)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(body))
    temporary.rename(path)


def imported():
    """Which moegate this interpreter has: the mark of its package, and its installed version; None without `site`."""
    if sys.flags.no_site:
        return None
    import importlib.metadata

    import moegate

    return [getattr(moegate, "MARK", None), importlib.metadata.version("moegate")]


def launch(argv, configs, value, metric):
    backend = option(argv, "moe-runner-backend")
    mode = os.environ.get("FAKE", "")
    resolved = {"auto": "torch"}.get(backend, backend)
    if mode == "wrong-backend":
        resolved = "reference"
    tuned = configs != "none" and resolved == "triton"
    use = {
        "op": "fused_experts", "projection": "up", "batch_size": 2, "file": "E=8.json" if tuned else None,
        "reason": "exact" if tuned and mode != "all-default" else "default", "config": {}, "alias": None, "calls": 1,
    }  # fmt: skip
    proof = {
        "engine": option(argv, "engine", "moegate"), "requested_backend": backend, "resolved_backend": resolved,
        "chain": [], "configs_root": None, "configs_digest": "" if configs == "none" else tree_digest(configs),
        "configs": [use] if resolved == "triton" else [], "calls": {resolved: 3}, "kernel_hash": "",
    }  # fmt: skip
    if mode == "other-kernels":
        proof["kernel_hash"] = "f" * 64
    if mode == "wrong-tree":
        proof["configs_digest"] = "0" * 64
    values = [float("nan")] if mode == "nan" else [value]
    return {
        "device": DEVICE, "started": "2027-01-01T00:00:00+00:00", "wall_s": 0.01,
        "samples": [{"metric": metric, "unit": "x", "better": "higher", "values": values, "primary": True}],
        "proof": proof, "peak_memory_bytes": None, "batch_sizes": {}, "arm": None, "pair": None, "order": None,
        "stage": None, "void_reason": "short requests" if mode == "void" else None, "detail": {"imported": imported()},
    }  # fmt: skip


def speed(argv, configs, salt):
    """Tuned is 30 % faster on triton; everything has a noise of half a percent, seeded by who asks."""
    noise = int(hashlib.sha256(f"{salt}{os.getpid()}".encode()).hexdigest()[:6], 16) / 0xFFFFFF - 0.5
    faster = configs != "none" and option(argv, "moe-runner-backend") == "triton"
    return (1.3 if faster else 1.0) * (1 + 0.01 * noise)


def abuse(mode):
    """What a hostile or broken cell does to its host; it goes on and reports success."""
    if mode == "gigabyte":
        for _ in range(1024):
            os.write(1, b"x" * (1 << 20))  # one line
    if mode == "noise":
        text = b"\xff\xfe\xc3\x28\x00\x1b[2J\x1b]8;;http://evil.example\x07click\x1b]8;;\x07\r\xe2\x80\xae"
        os.write(2, text + b"\n::error::planted\n##[error]planted\n" + text)
    if mode == "tell":  # what it may have found in the home folder
        print("s3cret-of-this-host", file=sys.stderr)
        sys.exit(1)
    if mode == "forks":
        for _ in range(1000):
            if os.fork() == 0:
                os.setsid()
                time.sleep(600)
    if mode == "files":
        for number in range(20_000):
            os.close(os.open(f"file-{number}", os.O_CREAT | os.O_WRONLY))
    if mode == "fill":
        try:
            with Path("big").open("wb") as stream:
                while True:
                    stream.write(b"x" * 65536)
        except OSError as error:
            print(f"fake: {error.strerror}", file=sys.stderr)
            sys.exit(1)
    if mode == "outside":
        Path("link").symlink_to("/etc")
        Path("../../../../planted").symlink_to("/etc/passwd")


def replace_result(path, mode):
    """Put something else where the result belongs."""
    path = Path(path)
    if mode == "sparse":
        path.touch()
        os.truncate(path, 300 << 30)
    if mode == "fifo":
        os.mkfifo(path)
    if mode == "symlink":
        path.symlink_to("/etc/passwd")
    if mode == "hardlink":
        os.link(__file__, path)
    if mode == "folder":
        path.mkdir()
    if mode == "deep":
        path.write_text("[" * 1_000_000)
    return path.exists() or path.is_symlink()


def misbehave(mode):
    if mode == "segfault":
        os.kill(os.getpid(), 11)
    if mode == "hang":
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if mode == "flood":
        for _ in range(2000):
            sys.stdout.write("x" * 65536)
    if mode == "usage":
        print("fake: --nothing is wrong", file=sys.stderr)
        sys.exit(2)
    if mode == "infra":
        print("fake: the device is busy", file=sys.stderr)
        sys.exit(3)
    if mode == "oom":
        print("torch.OutOfMemoryError: tried to allocate", file=sys.stderr)
        sys.exit(1)
    if mode == "lost":
        print("RuntimeError: UR_RESULT_ERROR_DEVICE_LOST", file=sys.stderr)
        sys.exit(1)
    if mode == "fail":
        print("fake: it does not work", file=sys.stderr)
        sys.exit(1)
    if mode == "silent":
        sys.exit(0)
    if mode == "orphan" and os.fork() == 0:
        os.setsid()
        time.sleep(600)


def held(lock):
    """Whether another process has this lock now."""
    try:
        with Path(lock).open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def wait_as_told():
    """Stand still until a test lets this child go on: what a pause of some length would only make likely."""
    time.sleep(float(os.environ.get("FAKE_SLEEP", "0")))
    hold, lock = os.environ.get("FAKE_HOLD"), os.environ.get("FAKE_AWAIT")
    while hold and Path(hold).exists():
        time.sleep(0.005)
    while lock and not held(lock) and not Path(lock).with_name("over").exists():
        time.sleep(0.005)


def lock_up(mode):
    """Leave what an ordinary user may not read, enter or remove."""
    place = {"output-locked": "out.bin", "folder-locked": "deep/sub"}[mode]
    Path("deep/sub/sub").mkdir(parents=True)
    Path("out.bin").write_text("x")
    Path(place).chmod(0)
    return {"outputs": {"out.bin": "0" * 64}} if mode == "output-locked" else {}


def main(argv):
    program, command = argv[0], argv[1]
    for name, value in (pair.split("=", 1) for pair in filter(None, os.environ.get("FAKE_ONLY", "").split(","))):
        if name == command:
            os.environ["FAKE"] = value
    mode = os.environ.get("FAKE", "")
    misbehave(mode)
    abuse(mode)
    wait_as_told()
    if program == "orchestrator":
        finding = {"rule": "bad-value", "severity": "error", "file": "x.json", "line": 3, "message": "no", "fix": "yes"}
        found = [finding] if mode == "findings" else []
        print(json.dumps({"findings": found, "counts": {}, "files": 4}))
        sys.exit(1 if found else 0)
    out = option(argv, "out")
    if command == "verify" and replace_result(out, mode):
        return
    if command == "verify":
        more = {}
        if mode == "big-output":
            Path("out.bin").touch()
            os.truncate("out.bin", 300 << 30)
            more = {"outputs": {"out.bin": "0" * 64}}
        odd = {"output-outside": "../" * 8 + "etc/passwd", "output-nul": "a\0b", "output-long": "x" * 300}
        if mode in odd:
            more = {"outputs": {odd[mode]: "0" * 64}}
        if mode.endswith("-locked"):
            more = lock_up(mode)
        case = {"name": "a", "status": "skipped" if mode == "skipped" else "passed", "message": "", "detail": {}}
        write(out, "kernel-test", cases=[case], **more)
    elif command == "tune":
        folder = Path(out) / "configs" / "triton_3_8_0"
        folder.mkdir(parents=True, exist_ok=True)
        journal = Path(out) / "journal"
        adopted = journal.exists()
        journal.touch()
        time.sleep(0 if adopted else float(os.environ.get("FAKE_TUNE_SLEEP", "0")))
        (folder / "E=8,N=64,device_name=cpu,dtype=float32.json").write_text('{"2": {"BLOCK_SIZE_M": 16}}')
        if mode == "tree-locked":
            next(folder.iterdir()).chmod(0)
        if mode == "tree-folder-locked":
            folder.chmod(0)
        if mode == "tree-read-only":
            folder.chmod(0o555)
        if mode == "link":
            (folder / "E=9,N=64,device_name=cpu.json").symlink_to("/etc/passwd")
        write(option(argv, "result"), "tune", detail={"adopted": adopted})
    elif command == "bench" and program == "tuner":
        configs = option(argv, "configs")
        write(out, "kernel-bench", [launch(argv, configs, speed(argv, configs, "k"), "speed")])
    elif command == "launch":
        configs = option(argv, "configs")
        client = argv[argv.index("--") + 1 :]
        assert client[-1].startswith("--out="), client
        kind = "accuracy" if any("accuracy" in arg for arg in client) else "serve"
        work = {"requests": 0} if mode == "idle" else {"requests": 2}
        write(
            option(client, "out"),
            kind,
            [launch(argv, configs, speed(argv, configs, "s"), "output_throughput")],
            work=work,
        )


main(sys.argv[1:])
