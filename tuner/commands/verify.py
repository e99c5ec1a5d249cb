"""`tuner verify`: ops that have a check against their twins, over dtypes and odd shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegate.errors import UsageError
from moegate.exits import Exit
from moegate.records import Case, Measurement
from tuner.commands.common import answer_stream, publish
from tuner.problem import DTYPES
from tuner.runtime import ensure_runnable, environment_words

__all__ = ["SHAPES", "run"]

_BACKENDS = ("triton", "torch")


@dataclass(frozen=True)
class Shape:
    """One shape of the routed experts, and the tile that Triton runs it with."""

    tokens: int
    E: int
    topk: int
    H: int
    N: int
    tile: tuple[int, int, int]
    absent: bool = False


SHAPES: tuple[Shape, ...] = (
    Shape(1, 4, 1, 32, 16, (16, 32, 32)),
    Shape(7, 8, 2, 128, 64, (16, 128, 64)),
    Shape(19, 4, 3, 96, 40, (32, 64, 64)),
    Shape(5, 6, 2, 80, 24, (16, 32, 32), absent=True),
)
"""Sizes that no tile divides, more tokens than a block, and tokens whose expert lives on another rank."""


def run(*, ops: str, dtypes: str, backend: str, out: Path | None, as_json: bool) -> int:
    """Check and write the record; exit code 1 where a case failed."""
    ensure_runnable()
    from tuner.checks import CHECKS

    wanted = list(CHECKS) if ops == "all" else [word.strip() for word in ops.split(",") if word.strip()]
    if not wanted:
        raise UsageError("names no op", field="--ops", fix=f"all or {', '.join(CHECKS)}")
    if unknown := [op for op in wanted if op not in CHECKS]:
        raise UsageError(f"unknown op {unknown[0]!r}", field="--ops", fix=f"all or {', '.join(CHECKS)}")
    kinds = [word.strip() for word in dtypes.split(",") if word.strip()]
    if not kinds:
        raise UsageError("names no dtype", field="--dtypes", fix=f"some of {', '.join(DTYPES)}")
    if unknown := [kind for kind in kinds if kind not in DTYPES]:
        raise UsageError(f"unknown dtype {unknown[0]!r}", field="--dtypes", fix=f"some of {', '.join(DTYPES)}")
    if backend not in (*_BACKENDS, "all"):
        raise UsageError(f"unknown backend {backend!r}", field="--backend", fix=f"{', '.join(_BACKENDS)} or all")
    from xkernels.device import is_interpreted, live

    backends = _BACKENDS if backend == "all" else (backend,)
    cases = list(_cases(wanted, kinds, backends))
    failed = [case for case in cases if case.status == "failed"]
    counted = sum(case.status != "skipped" for case in cases)
    good = bool(counted) and not failed
    words = None if counted else "every case was skipped"
    if failed:
        words = f"{len(failed)} of {counted} cases failed, first {failed[0].name}: {failed[0].message}"
    measurement = Measurement(
        "kernel-test",
        "ok" if good else "failed",
        live().identity(),
        environment_words(),
        {"cases": counted},
        cases=tuple(cases),
        interpreter=is_interpreted(),
        failure=words,
    )
    publish(measurement, out, as_json)
    said = answer_stream(as_json)
    for case in cases:
        if case.status != "passed":
            print(f"{case.status}: {case.name}: {case.message}", file=said)
    print(f"{counted - len(failed)} of {counted} cases passed, {len(cases) - counted} skipped", file=said)
    return Exit.OK if good else Exit.REGRESSION


def _cases(ops: list[str], dtypes: list[str], backends: tuple[str, ...]) -> Iterator[Case]:
    from tuner.checks import CHECKS

    for op in ops:
        for dtype in dtypes:
            for backend in backends:
                for shape in SHAPES:
                    yield CHECKS[op](dtype, backend, shape)


def describe(op: str, dtype: str, backend: str, shape: Any) -> str:
    """A case's name."""
    words = f"tokens={shape.tokens},E={shape.E},topk={shape.topk},H={shape.H},N={shape.N}"
    return f"{op} {dtype} {backend} {words}{' absent experts' if shape.absent else ''}"
