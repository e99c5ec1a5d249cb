"""`serving launch`: whole launches with real servers, and nothing left behind however they end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from moegate.configs import default_config
from moegate.configs.names import ConfigKey, format_name
from moegate.records import Measurement, read
from moegate.records import measurement as records
from serving.workdir import sweep

MODEL = Path("examples/models/tiny-moe").resolve()
INTERPRET = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
KEY = ConfigKey(8, 64, "cpu", "float32")


def bench(out: Path, **options: object) -> list[str]:
    values = {"requests": 4, "concurrency": 2, "input": 8, "output": 8, **options}
    return ["serving", "bench", *(f"--{name}={value}" for name, value in values.items()), f"--out={out}"]


def launch_of(path: Path) -> records.Launch:
    measured = read(Measurement, path)
    assert measured.kind == "serve"
    assert measured.status == "ok"
    (launch,) = measured.launches
    return launch


def configs(root: Path, **changes: int) -> Path:
    folder = root / "triton_3_8_0"
    folder.mkdir(parents=True)
    config = {
        **default_config(KEY, 1),
        "num_warps": 4,
        "num_stages": 2,
        "BLOCK_SIZE_N": 128,
        "BLOCK_SIZE_K": 128,
        **changes,
    }
    for projection in ("up", "down"):
        (folder / format_name(KEY, projection)).write_text(json.dumps({"1": config, "8": config}))
    return root


@pytest.mark.slow
def test_a_launch_measures_what_the_server_measures(serving: Callable, tmp_path: Path) -> None:
    """200 requests of 32 tokens, concurrency 4: the client's cost. Then longer ones: its clock against the server's."""
    out, long = tmp_path / "out.json", [tmp_path / f"long-{number}.json" for number in range(3)]
    loads = [
        [*bench(out, requests=200, concurrency=4, output=32), f"--events={tmp_path / 'events.jsonl'}"],
        *(bench(path, requests=4, output=500) for path in long),
    ]
    script = " && ".join(shlex.join([sys.executable, "-P", "-m", *words, "--max-lag=5000"]) for words in loads)
    done = serving("launch", f"--model={MODEL}", "--configs=none", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    launch = launch_of(out)
    assert launch.void_reason is None
    client = launch.detail["client"]
    assert client["cpu_s"] <= 2.0, "half a second where nothing else runs"
    # A busy machine delays the client now and then, a clock that is wrong is wrong each time.
    slow = [launch_of(path).detail for path in long]
    apart = [found["median_tpot_ms"] / found["client"]["server_median_tpot_ms"] - 1 for found in slow]
    assert min(map(abs, apart)) < 0.02, apart
    assert launch.detail["total_output_tokens"] == 200 * 32
    assert launch.primary().metric == "output_throughput"
    assert set(launch.batch_sizes) >= {"1", "2", "3", "4"}, "the warm-up met every batch size"
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 200 + client["warm_up_requests"]


def test_open_loop_keeps_its_schedule(serving: Callable, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [word for word in bench(out, requests=30, rate=60) if not word.startswith("--concurrency")]
    done = serving("launch", f"--model={MODEL}", "--configs=none", "--", *command, "--max-lag=1000")
    assert done.returncode == 0, done.stderr
    launch = launch_of(out)
    assert launch.detail["completed"] == 30
    assert launch.detail["duration"] > 0.25
    client = launch.detail["client"]
    assert client["lateness_p99_ms"] < 100 + 2 * client["lag_max_ms"], "late by what the machine kept it waiting"


@pytest.mark.slow
def test_triton_proves_which_file_it_read_and_that_none_means_default(serving: Callable, tmp_path: Path) -> None:
    answers = []
    for arm, folder in (("untuned", None), ("tuned", configs(tmp_path / "tree"))):
        out = tmp_path / f"{arm}.json"
        done = serving(
            "launch", f"--model={MODEL}", "--moe-runner-backend=triton", f"--configs={folder or 'none'}", "--",
            *bench(out, requests=2, output=2), "--max-lag=1000", **INTERPRET,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        launch = launch_of(out)
        assert read(Measurement, out).interpreter
        proof = launch.proof
        assert (proof.requested_backend, proof.resolved_backend) == ("triton", "triton")
        assert {use.batch_size for use in proof.configs} == {int(size) for size in launch.batch_sizes}
        assert sum(use.calls for use in proof.configs if use.projection == "up") == proof.calls["triton"] > 0
        reasons = {(use.reason, use.file) for use in proof.configs if use.projection == "down"}
        if arm == "untuned":
            assert reasons == {("default", None)}
            assert proof.configs_root is None
        else:
            assert reasons == {("exact", f"triton_3_8_0/{format_name(KEY, 'down')}")}
            assert {use.config["BLOCK_SIZE_N"] for use in proof.configs} == {128}
        answers.append((launch.detail["requests_sha256"], proof.configs_digest))
    assert answers[0][0] == answers[1][0]
    assert answers[0][1] != answers[1][1]


def test_accuracy_collects_answers_per_sample(serving: Callable, tmp_path: Path) -> None:
    rows = [{"id": f"s{i}", "prompt": [i + 2, 5, 9]} for i in range(6)]
    (tmp_path / "s.jsonl").write_text("\n".join(map(json.dumps, rows)))
    outs = []
    for graph in ("eager", "full"):
        out = tmp_path / f"{graph}.json"
        done = serving("launch", f"--model={MODEL}", "--configs=none", f"--graph={graph}", "--", "serving", "accuracy",
                       f"--samples={tmp_path / 's.jsonl'}", "--output=5", f"--out={out}")  # fmt: skip
        assert done.returncode == 0, done.stderr
        outs.append(read(Measurement, out).launches[0])
    assert outs[0].detail["scores"].keys() == {row["id"] for row in rows}
    assert all(0 < score <= 1 for score in outs[0].detail["scores"].values())
    assert all(len(answer["tokens"]) == 5 for answer in outs[0].detail["answers"].values())
    tokens = [{name: answer["tokens"] for name, answer in out.detail["answers"].items()} for out in outs]
    assert tokens[0] == tokens[1]
    assert outs[0].detail["input_sha256"] == outs[1].detail["input_sha256"]


def test_recorded_routing_is_where_it_was_asked_for(serving: Callable, tmp_path: Path) -> None:
    done = serving("launch", f"--model={MODEL}", "--configs=none", f"--record-routing={tmp_path / 'r'}", "--",
                   *bench(tmp_path / "o.json", requests=2, input=70, output=2))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "r").iterdir())[:2] == [
        "topk_ids_layer1_idx0.npy", "topk_ids_layer1_idx1.npy",
    ]  # fmt: skip
    assert "no expert choices" not in done.stderr


def test_a_launch_that_recorded_nothing_says_so_and_a_relative_import_path_reaches_its_server(
    serving: Callable, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sitecustomize.py").write_text(
        f"import sys\nopen({str(tmp_path / 'seen')!r}, 'a').write(' '.join(sys.orig_argv) + '\\n')\n"
    )
    done = serving("launch", f"--model={MODEL}", "--configs=none", f"--record-routing={tmp_path / 'r'}", "--", "true",
                   PYTHONPATH="lib")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"no expert choices were kept in {tmp_path / 'r'}: no prefill was long enough" in done.stderr
    assert any("-m serving.server " in line for line in (tmp_path / "seen").read_text().splitlines())


def test_a_server_that_ends_on_its_clients_says_why(serving: Callable, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    load = shlex.join([sys.executable, "-P", "-m", *bench(tmp_path / "o.json", requests=2, input=70, output=2)])
    done = serving("launch", f"--model={MODEL}", "--configs=none", f"--record-routing={folder}", "--",
                   "sh", "-c", f"rm -r {shlex.quote(str(folder))} && exec {load}")  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "the server ended with 3; its log ends:" in done.stderr
    assert f"No such file or directory: '{folder}" in done.stderr
    assert "no prefill was long enough" not in done.stderr


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--model=/nowhere"], 2, "no such model"),
        ([f"--model={MODEL}", "--configs=/nowhere"], 2, "no such folder"),
        ([f"--model={MODEL}", "--moe-runner-backend=triton"], 2, "fix: set TRITON_INTERPRET=1"),
        ([f"--model={MODEL}", "--moe-runner-backend=nonsense"], 2, "no backend 'nonsense'"),
        ([f"--model={MODEL}", "--dtype=int8"], 2, "'int8'"),
        ([f"--model={MODEL}", "--engine=trt"], 2, "unknown engine"),
        ([f"--model={MODEL}", "--graph=half"], 2, "eager or full"),
        ([f"--model={MODEL}", "--length=600"], 2, "the model has 512"),
        ([f"--model={MODEL}", "--slots=1000000"], 2, "do not fit the device's memory"),
        ([f"--model={MODEL}", "--memory-share=0"], 2, "memory-share"),
        ([f"--model={MODEL}", "--ready-timeout=-1"], 2, "ready-timeout"),
        (["--nonsense"], 2, "nonsense"),
    ],
)
def test_wrong_settings_exit_2_without_a_traceback(serving: Callable, options: list, code: int, words: str) -> None:
    done = serving("launch", *options, "--", "true")
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_engine_that_is_not_here_is_named(serving: Callable, engine: str) -> None:
    if find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed")
    done = serving("launch", f"--model={MODEL}", f"--engine={engine}", "--", "true")
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith(f"serving: {engine} is not installed for ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["bench", "--requests=0", "--input=4", "--output=2", "--concurrency=1"], "requests: is 0"),
        (["bench", "--requests=1", "--input=4", "--output=2", "--rate=nan"], "rate: is nan"),
        (["bench", "--requests=1", "--input=4", "--output=2"], "one of --concurrency and --rate"),
        (["accuracy", "--samples=/nowhere"], "/nowhere: No such file"),
        (["accuracy", "--samples=/nowhere", "--concurrency=0"], "--concurrency"),
    ],
)
def test_what_is_wrong_with_a_load_is_told_without_a_server(
    serving: Callable, tmp_path: Path, options: list, words: str
) -> None:
    done = serving(*options, f"--out={tmp_path / 'out.json'}", "--base-url=http://127.0.0.1:1")
    assert done.returncode == 2, done.stderr
    assert words in done.stderr


STRANGER = """
import json, os, pathlib, stat, sys, urllib.error, urllib.request
url, key = os.environ["MOEGATE_BASE_URL"], os.environ["MOEGATE_API_KEY"]
def ask(path, sent):
    request = urllib.request.Request(url + path, headers={"Authorization": sent} if sent else {})
    try:
        return urllib.request.urlopen(request, timeout=20).status
    except urllib.error.HTTPError as error:
        assert key not in error.read().decode()
        return error.code
told = pathlib.Path(os.environ["MOEGATE_LAUNCH"])
lines = b"".join(path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"))
print(json.dumps({
    "nothing": ask("/v1/models", None), "wrong": ask("/v1/server_info", "Bearer x"),
    "key": ask("/v1/models", "Bearer " + key), "health": ask("/health", None),
    "mode": stat.S_IMODE(told.stat().st_mode), "shown": key.encode() in lines,
}))
"""


def test_a_server_answers_only_who_has_its_launchs_key(serving: Callable) -> None:
    done = serving("launch", f"--model={MODEL}", "--configs=none", "--", sys.executable, "-c", STRANGER)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "nothing": 401, "wrong": 401, "key": 200, "health": 200, "mode": 0o600, "shown": False,
    }  # fmt: skip


@pytest.mark.parametrize("key", [None, "not-its-own"])
def test_a_load_without_the_servers_key_is_told_both_ways_to_have_it(serving: Callable, key: str | None) -> None:
    stranger = ["env", "-u", "MOEGATE_LAUNCH", "-u", "MOEGATE_API_KEY", *([f"MOEGATE_API_KEY={key}"] if key else []),
                sys.executable, "-m", *bench(Path("o.json"), requests=1, input=2, output=2)]  # fmt: skip
    done = serving("launch", f"--model={MODEL}", "--configs=none", "--", *stranger)
    assert done.returncode == 2, done.stderr
    assert "401" in done.stderr
    assert "--announce FILE" in done.stderr
    assert "export the same MOEGATE_API_KEY" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_commands_status_is_passed_on(serving: Callable) -> None:
    assert serving("launch", f"--model={MODEL}", "--configs=none", "--", "sh", "-c", "exit 7").returncode == 7
    gone = serving("bench", "--base-url=http://127.0.0.1:9", "--requests=1", "--input=1", "--output=1",
                   "--concurrency=1", "--out=o.json")  # fmt: skip
    assert gone.returncode == 3
    assert "does not answer" in gone.stderr


def test_an_engine_that_is_not_installed_is_said_so(serving: Callable) -> None:
    if __import__("importlib.util").util.find_spec("sglang"):
        pytest.skip("sglang is installed here")
    done = serving("launch", f"--model={MODEL}", "--engine=sglang", "--", "true")
    assert done.returncode == 3
    assert "sglang" in done.stderr


def servers(marker: str) -> list[int]:
    """Processes whose command line or working folder names this test."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes().decode(errors="replace") + str((entry / "cwd").readlink())
        except OSError:
            continue
        if marker in text:
            found.append(int(entry.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_a_launch(tmp_path: Path, until: Callable, number: signal.Signals) -> None:
    marker = f"name-{os.getpid()}-{int(number)}"
    argv = [sys.executable, "-P", "-m", "serving", "launch", f"--model={MODEL}", "--configs=none"]
    argv += [
        f"--engine-arg=--served-model-name={marker}",
        "--",
        "bash",
        "-c",
        f"touch ready; exec -a {marker} sleep 600",
    ]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(argv, cwd=tmp_path, env={**os.environ, "TMPDIR": str(temporary)})
    until((tmp_path / "ready").is_file)
    assert len(list(temporary.glob("moegate-serve-*"))) == 1
    workers = [pid for pid in servers(marker) if pid != process.pid]
    assert len(workers) >= 2, "server and command"
    worker_of = [int(p) for w in workers for p in Path(f"/proc/{w}/task/{w}/children").read_text().split()]
    process.send_signal(number)
    code = process.wait(60)
    assert code == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    until(lambda: not servers(marker) and not any(Path(f"/proc/{pid}").exists() for pid in worker_of))
    # Nobody tidies up after a SIGKILL; the next launch does.
    assert sweep(temporary) == (number == signal.SIGKILL)
    assert list(temporary.iterdir()) == []


def test_a_server_that_dies_ends_the_launch(tmp_path: Path, until: Callable) -> None:
    marker = f"die-{os.getpid()}"
    argv = [sys.executable, "-P", "-m", "serving", "launch", f"--model={MODEL}", "--configs=none",
            f"--engine-arg=--served-model-name={marker}", "--", "sh", "-c", "touch ready; sleep 600"]  # fmt: skip
    process = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until((tmp_path / "ready").is_file)
    named = [pid for pid in servers(marker) if pid != process.pid]
    (server,) = [pid for pid in named if "serving.server" in Path(f"/proc/{pid}/cmdline").read_text()]
    (worker,) = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    _, said = process.communicate(timeout=60)  # its command would go on for longer
    assert process.returncode == 3
    assert "the worker has ended" in said
    until(lambda: not servers(marker))


def test_two_resident_servers_take_load_in_turn(tmp_path: Path, until: Callable, serving: Callable) -> None:
    """What `residency: both` needs: servers that stay up, announced by a file, and loads that alternate."""
    argv = [sys.executable, "-P", "-m", "serving", "launch", f"--model={MODEL}", "--configs=none"]
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    processes = [subprocess.Popen([*argv, f"--announce={file}"], stdout=subprocess.PIPE, text=True) for file in files]
    try:
        until(lambda: all(file.is_file() for file in files))
        digests = set()
        for turn, arm in enumerate((0, 1, 1, 0)):
            out = tmp_path / f"{turn}.json"
            command = bench(out, requests=2, output=4)[1:]
            done = serving(*command, f"--launch={files[arm]}", "--max-lag=1000")
            assert done.returncode == 0, done.stderr
            digests.add(launch_of(out).detail["requests_sha256"])
        assert len(digests) == 1
        taken = serving(*argv[4:], f"--announce={files[0]}")
        assert (taken.returncode, files[0].is_file()) == (2, True)
        assert f"{files[0]}: --announce: tells of a launch that still runs, at http://127.0.0.1:" in taken.stderr
        (tmp_path / "stale.json").write_text(files[0].read_text())
        gone = serving(*bench(tmp_path / "x.json")[1:], f"--launch={tmp_path / 'none.json'}")
        assert gone.returncode == 2
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
    assert [process.communicate(timeout=60)[0].startswith("http://127.0.0.1:") for process in processes] == [True, True]
    assert [process.returncode for process in processes] == [143, 143]
    assert not any(file.exists() for file in files)
    stale = tmp_path / "stale.json"
    gone = serving(*bench(tmp_path / "x.json")[1:], f"--launch={stale}")
    assert gone.returncode == 3
    assert f"if the server has ended, start one: serving launch --announce {stale}" in gone.stderr
    refused = serving(*argv[4:], f"--announce={stale}", "--moe-runner-backend=none")
    assert (refused.returncode, stale.exists()) == (2, False)
    stale.write_text(r'{"base_url": "u", "work": "\u0000"}')  # nobody's, and no name of a folder
    refused = serving(*argv[4:], f"--announce={stale}", "--moe-runner-backend=none")
    assert (refused.returncode, stale.exists()) == (2, True), refused.stderr
