"""Every way to write a wrong matrix that we know of: exit 2, the file, the line, and what would be right."""

# ruff: noqa: E501 - a table reads best with one row a line

import subprocess
import sys
from pathlib import Path

import pytest

from moegate.errors import UsageError
from orchestrator.matrix import load
from orchestrator.plan import build

# (name, text to replace in the good matrix, replacement, line of the complaint, words in it, words in the fix)
EDITS = [
    ("unknown key", "name: demo", "name: demo\nnmae: demo", 3, "unknown key", "did you mean name?"),
    ("unknown key of a pool", "device: cpu,", "device: cpu, slot: 2,", 6, "unknown key", "slots"),
    ("unknown key of a load", "output: 8, seed: 1", "output: 8, sead: 1", 19, "unknown key", "seed"),
    ("axis of another kind", "    effort: quick", "    graph: full", 16, "unknown key", "graph"),
    ("duplicate key", "name: demo", "name: demo\nname: other", 3, "appears twice (first on line 2)", "keep one"),
    ("duplicate key deep down", "seed: 1}", "seed: 1, seed: 2}", 19, "appears twice", "keep one"),
    ("wrong type", "name: demo", "name: [demo]", 2, "is a list", "a name"),
    ("list for a mapping", "pools:\n  cpu: {device: cpu, image: cpu, ray: none}", "pools: [cpu]", 5, "mapping", "key: value"),
    ("text for a mapping", "  cpu: {dockerfile: cpu.Dockerfile}", "  - cpu", 3, "mapping", "key: value"),
    ("schema of the future", "schema: 1", "schema: 2", 1, "is '2'", "schema: 1"),
    ("schema missing", "schema: 1\n", "", 1, "is missing", "schema"),
    ("name missing", "name: demo\n", "", 1, "is missing", "name"),
    ("negative timeout", "timeout: 2m", "timeout: -2m", 12, "is not a duration", "90s"),
    ("timeout without unit", "timeout: 2m", "timeout: 120", 12, "is not a duration", "unit"),
    ("sexagesimal timeout", "timeout: 2m", "timeout: 12:30", 12, "'12:30' is not a duration", "20m"),
    ("zero timeout", "timeout: 2m", "timeout: 0s", 12, "is 0s", "from 1s"),
    ("octal number", "requests: 2", "requests: 010", 19, "'010' is not a whole number", "write 10"),
    ("fraction", "requests: 2", "requests: 2.5", 19, "is not a whole number", "digits only"),
    ("zero requests", "requests: 2", "requests: 0", 19, "is 0", "from 1"),
    ("huge number", "requests: 2", "requests: 99999999999999999999999", 19, "is not a whole number", "digits"),
    ("truth value as a name", "name: demo", "name: no", 2, "truth value", 'quote it: "no"'),
    ("truth value as a pool", "  cpu: {device", "  on: {device", 6, "truth value", 'quote it: "on"'),
    ("path traversal in a name", "name: demo", "name: ../../etc", 2, "is not a name", "letters"),
    ("upper-case name", "name: demo", "name: Demo", 2, "is not a name", "lower-case"),
    ("long name", "name: demo", "name: " + "a" * 64, 2, "is not a name", "at most 63"),
    ("control characters", "name: demo", 'name: "de\\x1bmo"', 2, "is not a name", "letters"),
    ("path out of the repository", "config: model", "config: ../model", 8, "leads outside", "inside the repository"),
    ("missing file", "config: model", "config: modell", 8, "does not exist", "config.json"),
    ("name too long for a file", "config: model", "config: " + "m" * 300, 8, "File name too long", "an existing path"),
    ("Dockerfile too long", "dockerfile: cpu.Dockerfile", "dockerfile: " + "d" * 300, 4, "File name too long", "an existing path"),
    ("missing Dockerfile", "dockerfile: cpu.Dockerfile", "dockerfile: gpu.Dockerfile", 4, "does not exist", "a path from"),
    ("image without a source", "{dockerfile: cpu.Dockerfile}", "{target: x}", 4, "needs dockerfile or reference", "write"),
    ("image without a digest", "{dockerfile: cpu.Dockerfile}", "{reference: 'a:latest'}", 4, "no digest", "sha256"),
    ("option instead of a path", "config: model", "config: --weights=x", 8, "looks like an option", "./"),
    ("unknown device", "device: cpu,", "device: tpu,", 6, "is 'tpu'", "'cpu', 'cuda', 'rocm', 'xpu'"),
    ("unknown isolation", "ray: none", "isolation: vm", 6, "is 'vm'", "'docker'"),
    ("bad Ray address", "ray: none", "ray: somewhere", 6, "neither local", "host:port"),
    ("unknown kind", "kind: tune", "kind: tunes", 15, "is not a kind", "did you mean tune?"),
    ("no kind", "  - kind: check", "  - models: [tiny]", 14, "has no kind", "one of check"),
    ("cell that is no mapping", "  - kind: check", "  - check", 14, "must be a mapping", "kind: serve"),
    ("no cells", "cells:\n", "cells: []\nold:\n", 13, "is empty", "at least one"),
    ("unknown pool", "pools: [cpu]", "pools: [gpu]", 12, "no pool is called gpu", "pools: cpu"),
    ("unknown model", "models: [tiny]", "models: [large]", 12, "no model is called large", "models: tiny"),
    ("unknown image", "image: cpu,", "image: xpu,", 6, "no image is called xpu", "images: cpu"),
    ("unknown arm", "candidate: tuned", "candidate: tune", 20, "no arm is called tune", "untuned, tuned"),
    ("same arm twice", "candidate: tuned", "candidate: untuned", 20, "is the baseline itself", "aa: true"),
    ("no compare", "compare: {baseline: untuned, candidate: tuned, expect: improved, screen: 3, confirm: 8, futility: none}\n",
     "", 17, "there is no `compare`", "baseline"),
    ("tuned without a tune cell", "  - kind: tune\n    effort: quick\n", "", 15, "there is no tune cell", "kind: tune"),
    ("tuned for another engine", "    effort: quick", "    engine: sglang", 17, "there is no tune cell", "same pool"),
    ("two tune cells", "  - kind: serve", "  - kind: tune\n    effort: full\n    dtypes: [float32]\n    batch_sizes: 4\n  - kind: serve",
     21, "2 tune cells", "keep one"),
    ("a cell twice", "  - kind: check", "  - kind: check\n  - kind: check", 15, "a second time", "remove one"),
    ("a value twice", "[auto, triton]", "[auto, auto]", 18, "lists 'auto' twice", "keep one"),
    ("empty axis", "[auto, triton]", "[]", 18, "is an empty list", "at least one"),
    ("backend that cannot be", "[auto, triton]", "[deep_gemm]", 18, "cannot serve on cpu", ""),
    ("backend that is none", "[auto, triton]", "[tritan]", 18, "has no backend", "one of"),
    ("both loops", "concurrency: 2,", "concurrency: 2, rate: 1.0,", 19, "one of them", "concurrency"),
    ("no loop", "concurrency: 2, ", "", 19, "one of them", "rate"),
    ("margin as a whole number", "margin: 1%", "margin: 1", 21, "is 1", "1%"),
    ("a rate that nothing reaches", "margin: 1%", "q: 1e-90", 21, "is 1e-90", "from 1e-12 to below 1"),
    ("margin in words", "margin: 1%", "margin: one", 21, "is not a share", "1%"),
    ("more pairs than anybody waits for", "confirm: 8", "confirm: 501", 20, "is 501", "from 1 to 500"),
    ("futility beyond confirm", "futility: none", "futility: 9", 20, "more than confirm", "or none"),
    ("required matches nothing", "margin: 1%", "required: ['serve/gpu/*']", 21, "matches no cell", "lists the labels"),
    ("bad tier", "margin: 1%", "tiers: {gpu/auto: functional}", 21, "is not pool/backend", "pools cpu"),
    ("bad quarantine day", "margin: 1%", "quarantine: [{cells: '*', reason: r, until: soon}]", 21, "not a day", "2027-01-31"),
    ("metric of a kind without one", "serve: output_throughput", "tune: x", 21, "is 'tune'", "'serve'"),
    ("reserved variable", "untuned: {configs: none}", "untuned: {env: {LD_PRELOAD: x.so}}", 10, "may not be set", "leave it out"),
    ("line break in a value", "untuned: {configs: none}", 'untuned: {env: {A: "x\\ny"}}', 10, "one line", "control"),
    ("configs that are no folder", "untuned: {configs: none}", "untuned: {configs: nowhere}", 10, "is not a folder", "git:REF"),
    ("commit that is none", "untuned: {configs: none}", "untuned: {configs: 'git:nowhere'}", 10, "", ""),
    ("source that is an option", "untuned: {configs: none}", "untuned: {source: --upload-pack=x}", 10, "not a git ref", "a branch"),
    ("docker without an image", "image: cpu, ray: none", "isolation: docker", 6, "docker needs an image", "image: NAME"),
    ("arms of a cell", "    effort: quick\n  - kind: serve", "    effort: quick\n  - kind: serve\n    arms: [untuned]", 18,
     "must be the two arms", "[untuned, tuned]"),
    ("exclude of no axis", "    effort: quick\n  - kind: serve", "    effort: quick\n  - kind: serve\n    exclude: [{color: red}]", 18,
     "is not an axis of serve", "one of"),
    ("include of a bad value", "    effort: quick\n  - kind: serve",
     "    effort: quick\n  - kind: serve\n    include: [{graph: half}]", 18, "", ""),
    ("everything excluded", "  - kind: check\n  - kind: tune\n    effort: quick\n  - kind: serve",
     "  - kind: serve\n    exclude: [{pools: cpu}]", 13, "makes no cell", "keep one"),
    ("tab indentation", "  cpu: {device", "\tcpu: {device", 6, "tab", "spaces"),
    ("broken YAML", "arms:", "arms: [", 11, "is not YAML", ""),
    ("unknown alias", "name: demo", "name: *demo", 2, "names no anchor", "&demo"),
    ("merge key", "name: demo", "name: demo\n<<: {a: b}", 3, "merge keys", "defaults"),
    ("tag", "name: demo", "name: !!python/name:os.system demo", 2, "has the tag", "without a tag"),
    ("second document", "name: demo", "name: demo\n---\nname: other", 3, "second document", "one matrix"),
    ("no value", "name: demo", "name:", 2, "has no value", "write a value"),
    ("an op whose shape no model tells", "effort: quick", "ops: [store_kv_cache]", 16, "'store_kv_cache'", "fused_experts"),
    ("a million cells", "  - kind: check", "  - kind: kernel-bench\n" + "".join(
        f"    {axis}: [{', '.join(f'{axis}{i}' for i in range(1000))}]\n" for axis in ("pools", "models")), 13,
     "multiplies to 1000003 cells", "at most 100000"),
]  # fmt: skip


def refusal(path: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        build(load(path))
    return caught.value


@pytest.mark.parametrize(("old", "new", "line", "says", "fix"), [edit[1:] for edit in EDITS], ids=[e[0] for e in EDITS])
def test_a_wrong_matrix_is_refused_at_its_line(repository, good, old, new, line, says, fix):
    assert good.count(old) == 1, "the edit must change exactly one place"
    path = repository / "matrix.yaml"
    path.write_text(good.replace(old, new))
    error = refusal(path)
    assert error.exit == 2
    assert error.file == str(path)
    assert error.line == line, str(error)
    assert says in str(error)
    assert fix in str(error)


FILES = [
    ("empty", b"", "is empty", 1),
    ("only a comment", b"# nothing\n", "is empty", 1),
    ("a list", b"- a\n", "top level", 1),
    ("a word", b"hello\n", "top level", 1),
    ("not UTF-8", b"schema: 1\nname: caf\xe9\n", "not UTF-8", 2),
    ("UTF-16", "schema: 1\n".encode("utf-16"), "not UTF-8", 1),
    ("NUL", b"schema: 1\nname: a\0b\n", "NUL", 2),
    ("too large", b"#" * ((1 << 20) + 1), "larger than 1 MiB", None),
    ("brackets", b"a: " + b"[" * 50_000, "is not YAML", 1),
    ("deep", b"a: " + b"[" * 30 + b"]" * 30, "nested more than", 1),
    ("alias bomb", b"a: &a [x, x, x, x, x, x, x, x, x, x]\n" + b"".join(
        b"%c: &%c [%s]\n" % (c, c, b", ".join([b"*%c" % (c - 1)] * 10)) for c in range(ord("b"), ord("h"))), "unfolds", 6),
    ("alias in itself", b"a: &a [*a]\n", "contains itself", 1),
    ("complex key", b"? [a, b]\n: c\n", "single word", 1),
    ("carriage returns and rubbish", b"schema: 1\r\nname: demo\r\n\x01\r\n", "not", 3),
]  # fmt: skip


@pytest.mark.parametrize(("data", "says", "line"), [file[1:] for file in FILES], ids=[file[0] for file in FILES])
def test_a_file_that_is_no_matrix_is_refused(repository, data, says, line):
    path = repository / "matrix.yaml"
    path.write_bytes(data)
    error = refusal(path)
    assert error.file == str(path)
    assert error.line == line, str(error)
    assert says in str(error)


def test_a_missing_file_and_a_folder_are_refused(repository):
    assert "cannot be read" in str(refusal(repository / "nowhere.yaml"))
    assert "is a folder" in str(refusal(repository))


def test_the_command_says_it_in_one_line_and_exits_2(repository, good):
    path = repository / "matrix.yaml"
    path.write_text(good.replace("timeout: 2m", "timeout: -2m"))
    for command in ("plan", "run"):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "orchestrator", command, str(path)],
            capture_output=True,
            text=True,
            cwd=repository,
        )
        assert done.returncode == 2
        assert f"{path}:12: defaults.timeout:" in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""
    assert not (repository / "runs").exists()
