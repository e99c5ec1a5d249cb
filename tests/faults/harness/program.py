"""Stands for tuner, serving and `orchestrator check`: real children, quick, and with the same answer every time.

usage: program.py LEDGER PROGRAM COMMAND [OPTION...]

What a launch measures depends on what it was asked for and on its number, never on the attempt, the process or the
time: so two runs of one matrix must end alike, however often they were cut off. Each launch writes a line into LEDGER,
and holds the processors that it may use: a second launch on one of them at the same time is written down as well.
It imports neither json nor pathlib, which would double what 100 starts of a run take.
"""

import fcntl
import hashlib
import os
import sys

DEVICE = {"kind": "cpu", "name": "fake", "identity": "cpu:fake", "arch": "cpu", "driver": "", "memory_bytes": 0}


def option(argv, name, default=None):
    return next((arg.split("=", 1)[1] for arg in argv if arg.startswith(f"--{name}=")), default)


def text(value):
    """JSON of what this program writes: plain text without anything to escape."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{text(name)}:{text(value[name])}" for name in value) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(text, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f'"{value}"' if isinstance(value, str) else repr(value)


def save(path, body):
    stream = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(stream, body.encode())
    os.close(stream)


def note(ledger, word):
    stream = os.open(f"{ledger}/launches", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(stream, f"{word} {os.getcwd()}\n".encode())
    os.close(stream)


def hold_processors(ledger):
    """Lock every processor of this launch; the locks go with the process."""
    for cpu in sorted(os.sched_getaffinity(0)):
        stream = os.open(f"{ledger}/cpu-{cpu}", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            note(ledger, "overlap")


def tree_digest(root):
    rows = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = f"{folder}/{name}"
            with open(path, "rb") as stream:
                rows.append([path[len(root) + 1 :], hashlib.sha256(stream.read()).hexdigest()])
    return hashlib.sha256(text(sorted(rows)).encode()).hexdigest()


def write(path, kind, launches=(), cases=(), work=None):
    body = {
        "kind": kind, "status": "ok", "device": DEVICE, "environment": {"fake": "1"}, "work": work or {"things": 1},
        "launches": list(launches), "cases": list(cases), "outputs": {}, "interpreter": True, "failure": None,
        "detail": {}, "schema": 1,
    }  # fmt: skip
    save(path + ".part", text(body))
    os.rename(path + ".part", path)


def launch(argv, metric):
    backend, configs = option(argv, "moe-runner-backend"), option(argv, "configs")
    resolved = {"auto": "torch"}.get(backend, backend)
    tuned = configs != "none" and resolved == "triton"
    salt = [arg for arg in argv if arg.startswith("--") and not arg.startswith(("--out=", "--configs=", "--samples="))]
    noise = int(hashlib.sha256(repr((salt, tuned, os.getcwd()[-3:])).encode()).hexdigest()[:6], 16) / 0xFFFFFF - 0.5
    use = {
        "op": "fused_experts", "projection": "up", "batch_size": 2, "file": "E=8.json" if tuned else None,
        "reason": "exact" if tuned else "default", "config": {}, "alias": None, "calls": 1,
    }  # fmt: skip
    proof = {
        "engine": option(argv, "engine", "moegate"), "requested_backend": backend, "resolved_backend": resolved,
        "chain": [], "configs_root": None, "configs_digest": "" if configs == "none" else tree_digest(configs),
        "configs": [use] if resolved == "triton" else [], "calls": {resolved: 3}, "kernel_hash": "",
    }  # fmt: skip
    value = (1.3 if tuned else 1.0) * (1 + 0.01 * noise)
    return {
        "device": DEVICE, "started": "2027-01-01T00:00:00+00:00", "wall_s": 0.01,
        "samples": [{"metric": metric, "unit": "x", "better": "higher", "values": [value], "primary": True}],
        "proof": proof, "peak_memory_bytes": None, "batch_sizes": {}, "arm": None, "pair": None, "order": None,
        "stage": None, "void_reason": None, "detail": {},
    }  # fmt: skip


def accuracy(argv):
    made = launch(argv, "accuracy")
    made["detail"] = {"scores": {str(number): 1.0 for number in range(400)}}
    return made


def tune(argv):
    out = option(argv, "out")
    folder = f"{out}/configs/triton_3_8_0"
    os.makedirs(folder, exist_ok=True)
    save(f"{out}/journal", "")
    body = text({"2": {"BLOCK_SIZE_M": 16}, "for": option(argv, "dtype")})
    save(f"{folder}/E=8,N=64,device_name=cpu,dtype=float32.json", body)
    write(option(argv, "result"), "tune")


def main(argv):
    ledger, program, command = argv[:3]
    hold_processors(ledger)
    note(ledger, "begin")
    out = option(argv, "out")
    if program == "orchestrator":
        print(text({"findings": [], "counts": {}, "files": 4}))
    elif command == "verify":
        write(out, "kernel-test", cases=[{"name": "a", "status": "passed", "message": "", "detail": {}}])
    elif command == "tune":
        tune(argv)
    elif command == "bench":
        write(out, "kernel-bench", [launch(argv[2:], "speed")])
    else:
        client = argv[argv.index("--") + 1 :]
        kind = "accuracy" if "accuracy" in client else "serve"
        found = accuracy(argv[2:]) if kind == "accuracy" else launch(argv[2:], "output_throughput")
        write(option(client, "out"), kind, [found], work={"requests": 2})
    note(ledger, "end")


main(sys.argv[1:])
