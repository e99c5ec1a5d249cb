"""Every reader of foreign data, fed with mutations: an answer or a clean refusal, quickly, and never a traceback.

A short run belongs to the tests, always of the same seeds, so that no change is refused by the luck of the draw.
MOEGATE_FUZZ_SECONDS=600 fuzzes each target for ten minutes, MOEGATE_FUZZ_SEED plays a series again (0: draws one),
MOEGATE_FUZZ_OUT names a folder for what was done.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from moegate import canonical, journal
from moegate.configs import parse_name
from moegate.configs.engines import ENGINES
from moegate.errors import UsageError
from moegate.families import layout_of
from moegate.records import Measurement, Plan, RunBundle, from_json, to_json
from orchestrator.check.files import check_bytes
from orchestrator.check.trees import Entry
from orchestrator.commands._conclude import bundle_of
from orchestrator.matrix import load
from orchestrator.plan import build
from reports import html, junit, sarif, summary
from tests.standin.environment import number

ROOT = Path(__file__).resolve().parents[2]
SECONDS = number("MOEGATE_FUZZ_SECONDS", 1.0, least=0.0)
SEED = number("MOEGATE_FUZZ_SEED", 1, least=0) or random.SystemRandom().randrange(1, 1 << 30)
OUT = os.environ.get("MOEGATE_FUZZ_OUT")
SLOWEST_S = 10.0
MOST_MIB = 400
LIMIT_MIB = 2048

# Mutations of bytes: (what, where, how much, token)
TOKENS = (
    b"null", b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b"9" * 60, b"9" * 5000, b'""', b"[]", b"{}", b"true", b"no",
    b"~", b"&a", b"*a", b"!!python/object:os.system", b"<<: *a", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\xd9\xa1",
    b"[" * 3000, b'{"a":' * 3000, b"\\", b'"', b"'", b",", b":", b": ", b"- ", b"=", b"../..", b"/etc/passwd", b"$HOME",
    b"\n", b"\r\n", b"\n\n", b"\t", b"data: ", b"\xe2\x80\xae", b"1_000", b"0x10", b"010", b"1:30", b"# ", b"| ", b"%",
)  # fmt: skip
BYTE_EDITS = st.lists(
    st.tuples(
        st.sampled_from(("cut", "repeat", "token", "flip", "end")), st.integers(0, 1 << 16), st.integers(1, 80),
        st.one_of(st.sampled_from(TOKENS), st.binary(min_size=1, max_size=8)),
    ), min_size=1, max_size=5,
)  # fmt: skip

# Mutations of JSON: (what, which value of all, another one or a new value)
VALUES = st.one_of(
    st.sampled_from(
        (None, True, False, 0, -1, 1 << 63, 10**40, 10**400, 1e308, 1e300, 5e-324, -0.0, "", "..", "/etc/passwd",
         "../../x", "é" * 300, "\ud800", "\x00", "\u202e", "a\nb", "<script>",
         [], {}, [[]], [None], {"": None}, {"__class__": 1})
    ),
    st.integers(-1 << 40, 1 << 40), st.floats(), st.text(max_size=20),
)  # fmt: skip
JSON_EDITS = st.lists(
    st.tuples(st.sampled_from(("put", "put", "drop", "key", "swap", "grow")), st.integers(0, 1 << 16), VALUES),
    min_size=1, max_size=4,
)  # fmt: skip


def edit_bytes(data: bytes, edits: list[tuple[str, int, int, bytes]]) -> bytes:
    """Apply byte edits in order."""
    for what, place, size, token in edits:
        at = place % (len(data) + 1)
        if what == "cut":
            data = data[:at] + data[at + size :]
        elif what == "repeat":
            data = data[:at] + data[at : at + size] * 2 + data[at + size :]
        elif what == "token":
            data = data[:at] + token + data[at + size % 7 :]
        elif what == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << size % 8)]) + data[at + 1 :]
        elif what == "end":
            data = data[:at]
    return data


def edit_json(document: Any, edits: list[tuple[str, int, Any]]) -> Any:
    """Apply edits of values in order; the document itself is not changed."""
    document = json.loads(json.dumps(document))
    for what, place, value in edits:
        spots = _spots(document)
        if not spots:
            break
        box, key = spots[place % len(spots)]
        if what == "put":
            box[key] = json.loads(json.dumps(value))  # one drawn value may go into several places
        elif what == "drop":
            del box[key]
        elif what == "key" and isinstance(box, dict):
            box[str(value)[:40]] = box.pop(key)
        elif what == "swap":
            other, name = spots[(place // 7) % len(spots)]
            box[key] = json.loads(json.dumps(other[name]))
        elif what == "grow" and isinstance(box, list):
            box.extend([box[key]] * (place % 40))
    return document


def _spots(node: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    todo = [node]
    while todo:
        here = todo.pop()
        keys = list(here) if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else ()
        found += [(here, key) for key in keys]
        todo += [here[key] for key in keys]
    return found


def clean(work: Callable[[], Any]) -> Any:
    """What the work returns, or None where it refuses as our readers do."""
    try:
        return work()
    except UsageError as error:
        str(error).encode("utf-8", "backslashreplace")
        return None


def show(bundle: RunBundle | None) -> None:
    """Write every report of a run that was not refused."""
    if bundle is not None:
        for render in (html.render, junit.render, sarif.render, summary.render):
            render(bundle).encode()
        json.dumps([to_json(bundle.comparison), to_json(bundle.gate)], allow_nan=False)


# The targets: each makes, from its fixtures, a strategy and what must hold of a drawn value.

Target = tuple[st.SearchStrategy[Any], Callable[[Any], Any]]


def matrix(workshop: Path, run: Path) -> Target:
    """matrix.yaml: loaded and planned, or refused with its line."""
    names = ("matrices/b60.yaml", "matrices/h200.yaml", "matrices/regression-demo.yaml", "matrix.yaml")
    texts = [(ROOT / name).read_bytes() for name in names]
    file = workshop / "repo" / "fuzzed.yaml"

    def check(drawn: tuple[bytes, list[Any]]) -> None:
        file.write_bytes(edit_bytes(*drawn))
        plan = clean(lambda: build(load(file)))
        if plan is not None:
            assert from_json(Plan, to_json(plan)) == plan

    return st.tuples(st.sampled_from(texts), BYTE_EDITS), check


def journal_(workshop: Path, run: Path) -> Target:
    """A journal, torn and flipped, and one whose sums are right and whose entries are not."""
    whole = (run / "journal").read_bytes()
    bodies = [{"seq": e.seq, "kind": e.kind, "time": e.time, "data": e.data} for e in journal.read(run / "journal")]

    def check(drawn: tuple[str, list[Any]]) -> None:
        if drawn[0] == "bytes":
            data = edit_bytes(whole, drawn[1])
        else:
            texts = [json.dumps(body, separators=(",", ":")) for body in edit_json(bodies, drawn[1])]
            data = b"".join(f'{text[:-1]},"sum":"{journal._sum(text)}"}}\n'.encode() for text in texts)
        (run / "journal").write_bytes(data)
        clean(lambda: bundle_of(run))

    return st.one_of(st.tuples(st.just("bytes"), BYTE_EDITS), st.tuples(st.just("json"), JSON_EDITS)), check


ENTRY = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
BODY = json.dumps({"1": ENTRY, "16": {**ENTRY, "USE_TMA": True}, "triton_version": "3.4.0"}).encode()
NAME = "E=256,N=128,device_name=NVIDIA_H20,dtype=fp8_w8a8,block_shape=[128, 128],per_channel_quant=True_down.json"


def config(workshop: Path, run: Path) -> Target:
    """A config file and its name, under the rules of every engine."""

    def check(drawn: tuple[list[Any], list[Any]]) -> None:
        name = edit_bytes(NAME.encode(), drawn[0]).decode("utf-8", "surrogateescape")
        parse_name(name)
        entry = Entry("file", run / NAME, "", NAME)
        for engine in ENGINES.values():
            check_bytes(entry, name, engine, edit_bytes(BODY, drawn[1]))

    return st.tuples(BYTE_EDITS, BYTE_EDITS), check


def model_config(workshop: Path, run: Path) -> Target:
    """A model's config.json: what it says of its experts, and whether our server could serve it."""
    from serving.server.spec import spec_from

    files = sorted((ROOT / "examples/models").glob("*/config.json"))
    documents = [json.loads(file.read_text()) for file in files]

    def check(drawn: tuple[Any, list[Any]]) -> None:
        document = clean(lambda: canonical.loads_json(json.dumps(edit_json(*drawn))))
        layout = clean(lambda: layout_of(document, file="config.json"))
        for engine in ENGINES if layout is not None else ():
            clean(lambda engine=engine: layout.key("X", tp=2, engine=engine))
        clean(lambda: spec_from(document))

    return st.tuples(st.sampled_from(documents), JSON_EDITS), check


def plan(workshop: Path, run: Path) -> Target:
    """plan.json of a run that somebody sent: read, compared, gated and reported, or refused."""
    document = json.loads((run / "plan.json").read_text())

    def check(edits: list[Any]) -> None:
        (run / "plan.json").write_text(json.dumps(edit_json(document, edits)))
        show(clean(lambda: bundle_of(run)))

    return JSON_EDITS, check


def result(workshop: Path, run: Path) -> Target:
    """A measurement that somebody sent, with a journal that vouches for it: up to the report."""
    entries = [e for e in journal.read(run / "journal") if e.kind == "done"]
    documents = {entry.seq: json.loads((run / entry.data["result"]).read_text()) for entry in entries}
    results = {entry.seq: entry.data["result"] for entry in entries}
    lines = (run / "journal").read_text().splitlines()

    def check(drawn: tuple[int, list[Any]]) -> None:
        seq, edits = drawn
        text = json.dumps(edit_json(documents[seq], edits))
        (run / results[seq]).write_text(text)
        clean(lambda: from_json(Measurement, json.loads(text)))
        body = json.loads(lines[seq])
        body.pop("sum")
        body["data"]["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        line = canonical.dumps(body)
        signed = f'{line[:-1]},"sum":"{journal._sum(line)}"}}'
        (run / "journal").write_text("\n".join([*lines[:seq], signed, *lines[seq + 1 :], ""]))
        show(clean(lambda: bundle_of(run)))
        (run / results[seq]).write_text(json.dumps(documents[seq]))

    return st.tuples(st.sampled_from(sorted(documents)), JSON_EDITS), check


STREAM = (
    b'data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":" 17","token_ids":[17]}]}\n\n' * 3
    + b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3},"timing":{"first_s":0.1}}\n\n'
    + b"data: [DONE]\n\n"
)


def stream(workshop: Path, run: Path) -> Target:
    """A server's event stream, in pieces of any size: an event with numbers or with an error."""
    pytest.importorskip("aiohttp")
    from serving.load.client import Event, _read

    class Pieces:
        def __init__(self, data: bytes, sizes: list[int]) -> None:
            self.data, self.sizes = data, sizes

        async def readany(self) -> bytes:
            size = self.sizes.pop() if self.sizes else 1 << 16
            piece, self.data = self.data[:size], self.data[size:]
            return piece

    def read(data: bytes, sizes: list[int]) -> Event:
        event = Event(index=0, asked=3, input_tokens=4)
        asyncio.run(_read(Pieces(data, sizes), event))  # type: ignore[arg-type]
        return event

    def check(drawn: tuple[list[Any], list[int]]) -> None:
        data = edit_bytes(STREAM, drawn[0])
        whole, pieces = read(data, []), read(data, list(drawn[1]))
        assert (whole.error, whole.tokens, whole.server) == (pieces.error, pieces.tokens, pieces.server)
        if whole.ok:
            assert whole.arrivals
            assert whole.tokens > 0
        json.dumps([whole.error, whole.tokens, whole.prompt_tokens, whole.server], allow_nan=False)

    return st.tuples(BYTE_EDITS, st.lists(st.integers(1, 90), max_size=12)), check


def request(workshop: Path, run: Path) -> Target:
    """A body for our server: a completion within the model's limits, or a 4xx that can be sent."""
    pytest.importorskip("starlette")
    from starlette.responses import JSONResponse

    from serving.server.app import _error
    from serving.server.completions import BadRequest, Limits, parse

    limits = Limits(vocab=256, length=64, model="tiny")
    body = {
        "model": "tiny", "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "logprobs": 1, "n": 1, "stop": None, "logit_bias": {},
    }  # fmt: skip

    refused: list[int] = []

    def check(drawn: tuple[str, list[Any]]) -> None:
        refused.clear()
        raw = json.dumps(body).encode()
        raw = edit_bytes(raw, drawn[1]) if drawn[0] == "bytes" else json.dumps(edit_json(body, drawn[1])).encode()
        try:
            asked = parse(raw, limits)
        except BadRequest as error:
            refused.append(error.status)
            JSONResponse(_error(error.message, "invalid_request_error", error.field, error.status), error.status)
        if refused:
            assert 400 <= refused[0] < 500
            return
        assert 1 <= len(asked.prompt) + asked.max_tokens <= limits.length
        assert all(type(token) is int and 0 <= token < limits.vocab for token in asked.prompt)

    return st.one_of(st.tuples(st.just("bytes"), BYTE_EDITS), st.tuples(st.just("json"), JSON_EDITS)), check


TARGETS = {
    "matrix": matrix, "journal": journal_, "config": config, "model-config": model_config, "plan": plan,
    "result": result, "stream": stream, "request": request,
}  # fmt: skip


@contextmanager
def bounded(mib: int) -> Iterator[None]:
    """Let this process have so much more memory: what takes it all is a MemoryError with its seed, and no kill."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (mib << 20), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.timeout(SECONDS * 2 + 300)
@pytest.mark.parametrize("name", TARGETS)
def test_fuzz(name: str, workshop: Path, run: Path) -> None:
    strategy, check = TARGETS[name](workshop, run)
    began, done, slowest = time.monotonic(), 0, 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    number = SEED
    print(f"{name}: MOEGATE_FUZZ_SEED={SEED}")
    while time.monotonic() - began < SECONDS:

        @seed(number)
        @settings(max_examples=60, database=None, deadline=None, suppress_health_check=list(HealthCheck),
                  phases=(Phase.generate, Phase.shrink))  # fmt: skip
        @given(strategy)
        def series(drawn: Any) -> None:
            nonlocal done, slowest
            start = time.process_time()
            with bounded(LIMIT_MIB):
                check(drawn)
            done, slowest = done + 1, max(slowest, time.process_time() - start)

        series()
        number += 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    if OUT:
        facts = {"target": name, "seconds": SECONDS, "seeds": [SEED, number - 1], "examples": done,
                 "slowest_s": round(slowest, 3), "grown_mib": grown}  # fmt: skip
        Path(OUT).mkdir(parents=True, exist_ok=True)
        (Path(OUT) / f"{name}.json").write_text(json.dumps(facts) + "\n")
    assert slowest < SLOWEST_S
    assert grown < MOST_MIB
