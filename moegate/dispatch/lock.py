"""The dispatch lock: what every op x platform x request comes to, in a file that a change has to touch.

Beside it the lock holds what every model family reads from a probe config, for the same reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moegate import canonical
from moegate.dispatch.model import Capabilities, DispatchRefused, Problem, Row
from moegate.dispatch.platforms import NAMES
from moegate.dispatch.rows import ROWS
from moegate.dispatch.select import AUTO, select
from moegate.errors import UsageError
from moegate.families import probe
from moegate.paths import write_atomic

SCHEMA = 1

# What each op is asked about, its usual problem first; several where the storage of the weights or sizes decide.
PROBLEMS: Mapping[str, Mapping[str, Problem]] = {
    "fused_experts": {
        "bfloat16": Problem(experts=64, topk=6),
        "fp8 [128,128]": Problem(quant="fp8_w8a8", block_shape=(128, 128), experts=256, topk=8),
        "fp8 [128,128] over deepep": Problem(
            quant="fp8_w8a8", block_shape=(128, 128), a2a="deepep", experts=256, topk=8
        ),
        "fp8 per channel": Problem(quant="fp8_w8a8", per_channel=True, experts=256, topk=8),
        "mxfp4": Problem(quant="mxfp4_w4a16", block_shape=(1, 32), activation="swiglu", experts=32, topk=4),
        "mxfp8": Problem(quant="mxfp8", block_shape=(1, 32), experts=256, topk=8),
        "nvfp4": Problem(quant="nvfp4_w4a16", block_shape=(1, 16), experts=256, topk=8),
        "int4": Problem(quant="int4_w4a16", block_shape=(0, 128), experts=64, topk=6),
    },
    "block_fp8_linear": {
        "[128,128]": Problem(quant="fp8_w8a8", block_shape=(128, 128)),
        "[1,128]": Problem(quant="fp8_w8a8", block_shape=(1, 128), ue8m0=True),
        "[32,32]": Problem(quant="fp8_w8a8", block_shape=(32, 32), ue8m0=True),
        "[1,32]": Problem(quant="fp8_w8a8", block_shape=(1, 32), ue8m0=True),
    },
    "fp8_linear": {"per tensor": Problem(quant="fp8_w8a8"), "per channel": Problem(quant="fp8_w8a8", per_channel=True)},
    "topk": {"64 experts": Problem(experts=64, topk=6, groups=2), "160 experts": Problem(experts=160, topk=6)},
    "grouped_topk": {
        "256 experts": Problem(experts=256, topk=8, groups=8), "160 experts": Problem(experts=160, topk=6, groups=8),
    },
}  # fmt: skip
_ANY: Mapping[str, Problem] = {"bfloat16": Problem()}


def usual(op: str) -> Problem:
    """What an op is asked where nobody says more: one that serves quantised weights alone has those, for example."""
    return next(iter(PROBLEMS.get(op, _ANY).values()))


_PACKAGES = frozenset({"deep_gemm", "flashinfer", "aiter", "sgl_kernel", "torch_npu", "triton_kernels", "humming"})
_SETTINGS = (("SGLANG_USE_AITER", "1"),)
_FACTS = (("npu_arch35", True),)


@dataclass(frozen=True)
class LockChange:
    """One entry that differs: where, and both answers with their chains."""

    op: str
    platform: str
    problem: str
    installed: str
    request: str
    before: Any
    after: Any

    @property
    def words(self) -> str:
        """The change in one line."""
        where = f"{self.op} on {self.platform}, {self.problem}, {self.installed}, {self.request}"
        return f"{where}: {_resolved(self.before)} -> {_resolved(self.after)}"


def table(rows: tuple[Row, ...] = ROWS) -> dict[str, Any]:
    """The lock's content for `rows`: op -> platform -> problem -> installed -> answers.

    `bare` has torch and Triton only; `full` has every foreign package too and is left out where it answers the same.
    `auto` has the chain that led to its answer; other requests are served, or refused with a reason.
    """
    ops: dict[str, Any] = {}
    for op in dict.fromkeys(row.op for row in rows):
        ops[op] = {platform: _platform(op, platform, rows) for platform in NAMES}
    return {"schema": SCHEMA, "ops": ops, "families": probe.answers()}


def _platform(op: str, platform: str, rows: tuple[Row, ...]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for words, problem in PROBLEMS.get(op, _ANY).items():
        bare = Capabilities(platform, "2.13.0", "3.8.0", interpreter=platform == "cpu")
        full = replace(bare, packages=_PACKAGES, env=_SETTINGS, probes=_FACTS)
        answers = {"bare": _answers(op, problem, bare, rows)}
        everything = _answers(op, problem, full, rows)
        if everything != answers["bare"]:
            answers["full"] = everything
        out[words] = answers
    return out


def _answers(op: str, problem: Problem, caps: Capabilities, rows: tuple[Row, ...]) -> dict[str, Any]:
    """`auto`'s chain, the names that are served, and the refused ones by reason."""
    served: list[str] = []
    refused: dict[str, list[str]] = {}
    for name in (row.backend for row in rows if row.op == op):
        try:
            served.append(select(op, problem, caps, name, rows=rows).resolved)
        except DispatchRefused as refusal:
            refused.setdefault(refusal.chain[-1].why if refusal.chain else refusal.message, []).append(name)
    return {"auto": _chain(op, problem, caps, rows), "served": served, "refused": refused}


def _chain(op: str, problem: Problem, caps: Capabilities, rows: tuple[Row, ...]) -> list[str]:
    """The rows that `auto` looked at; those of other platforms are under `refused`."""
    try:
        chain = select(op, problem, caps, AUTO, rows=rows).chain
    except DispatchRefused as refusal:
        chain = refusal.chain
    elsewhere = f"not on {caps.platform}"
    return [f"{s.backend}: {'chosen' if s.chosen else s.why}" for s in chain if s.chosen or s.why != elsewhere]


def dumps(content: Mapping[str, Any]) -> str:
    """The lock file's text: one line per platform and problem, so that a diff reads well."""
    lines = ["{", f' "schema": {content["schema"]},', ' "ops": {']
    ops = list(content["ops"].items())
    for i, (op, platforms) in enumerate(ops):
        lines.append(f"  {json.dumps(op)}: {{")
        names = list(platforms.items())
        for j, (platform, problems) in enumerate(names):
            lines.append(f"   {json.dumps(platform)}: {{")
            items = list(problems.items())
            for k, (problem, answers) in enumerate(items):
                lines.append(f"    {json.dumps(problem)}: {json.dumps(answers)}" + ("," if k + 1 < len(items) else ""))
            lines.append("   }" + ("," if j + 1 < len(names) else ""))
        lines.append("  }" + ("," if i + 1 < len(ops) else ""))
    lines += [" },", ' "families": {']
    families = list(content["families"].items())
    for i, (name, said) in enumerate(families):
        lines.append(f"  {json.dumps(name)}: {json.dumps(said)}" + ("," if i + 1 < len(families) else ""))
    return "\n".join([*lines, " }", "}", ""])


def write(path: Path, rows: tuple[Row, ...] = ROWS) -> None:
    """Write the lock for the table as it is."""
    write_atomic(path, dumps(table(rows)))


def read(path: Path) -> dict[str, Any]:
    """Read a lock file.

    Raises:
        UsageError: missing, damaged, or of another schema.
    """
    return parse(canonical.load_json(path), str(path))


def parse(content: Any, file: str) -> dict[str, Any]:
    """Check that parsed JSON is a lock of this schema."""
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or not isinstance(content.get("ops"), dict):
        raise UsageError("is no dispatch lock of this version", file=file, fix="run `orchestrator dispatch lock`")
    return content


def diff(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[LockChange, ...]:
    """Entries that differ between two locks, in table order."""
    old, new = dict(_flat(before)), dict(_flat(after))
    places = dict.fromkeys([*new, *old])
    pairs = ((place, _answer(old, place), _answer(new, place)) for place in places)
    return tuple(LockChange(*place, was, now) for place, was, now in pairs if was != now)


def family_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    """(architecture, before, after) of every family that reads the probe differently; `nothing` where it is absent."""
    old, new = before.get("families"), after["families"]
    if not isinstance(old, dict):
        return ()
    names = dict.fromkeys([*new, *old])
    pairs = ((name, str(old.get(name, "nothing")), str(new.get(name, "nothing"))) for name in names)
    return tuple(item for item in pairs if item[1] != item[2])


_Place = tuple[str, str, str, str, str]


def _answer(entries: Mapping[_Place, Any], place: _Place) -> Any:
    """What a lock says at `place`; `full` is left out of one where it answers as `bare` does."""
    op, platform, problem, _, request = place
    return entries.get(place, entries.get((op, platform, problem, "bare", request)))


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[_Place, Any]]:
    for op, platforms in content["ops"].items():
        for platform, problems in _items(platforms):
            for problem, kinds in _items(problems):
                for installed, answers in _items(kinds):
                    for request, answer in _requests(answers):
                        yield (op, platform, problem, installed, request), answer


def _requests(answers: Any) -> Iterator[tuple[str, Any]]:
    """(request, answer) for every name of one entry."""
    if not isinstance(answers, dict):
        return
    yield AUTO, answers.get("auto")
    for name in answers.get("served") or ():
        yield str(name), str(name)
    for why, names in _items(answers.get("refused")):
        for name in names if isinstance(names, list) else ():
            yield str(name), f"refused: {why}"


def requests(content: Mapping[str, Any], op: str, platform: str) -> frozenset[str]:
    """Every request that a lock has an answer for."""
    return frozenset(place[4] for place, _ in _flat(content) if place[:2] == (op, platform))


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from value.items()


def _resolved(answer: Any) -> str:
    if answer is None:
        return "nothing"
    if isinstance(answer, list):
        backend, _, said = str(answer[-1] if answer else "").partition(": ")
        return backend if said == "chosen" else "refused"
    return str(answer)


def line_of(text: str, change: LockChange) -> int:
    """The line of a lock file's text that holds a change's entry, 1 where it has none."""
    op = platform = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith('  "'):
            op = line.strip().rstrip(": {").strip('"')
        elif line.startswith('   "'):
            platform = line.strip().rstrip(": {").strip('"')
        elif (op, platform) == (change.op, change.platform) and line.startswith(f"    {json.dumps(change.problem)}:"):
            return number
    return 1
