"""`tuner compare`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from moegate.configs import ConfigTree
from moegate.errors import UsageError
from moegate.exits import Exit
from moegate.records import to_json
from tuner.child.client import ChildSpec
from tuner.commands import FEW_SIZES
from tuner.commands.common import INTERPRETED, interpreter_of, parse_sizes, print_json
from tuner.compare import LEAST_LEVEL, Compared, compare
from tuner.engines import ensure_engine
from tuner.live import LiveOptions
from tuner.lookup import Lookup, lookup
from tuner.model import problem_of
from tuner.pipeline import device_name_of, interpreter_env
from tuner.progress import Progress
from tuner.routing.source import source_of

__all__ = ["run"]


def run(*, a: str, b: str, model: Path | None, shape: str | None, op: str, dtype: str, batch_sizes: str, launches: int,
        rounds: int, margin: float, engine: str, routing: str, seed: int, python: str | None,
        as_json: bool) -> int:  # fmt: skip
    """Measure and print; exit code 1 where B is slower than A at some batch size."""
    ensure_engine(engine)
    if not 0 < margin < 1:
        raise UsageError(f"is {margin:g}", field="--margin", fix="between 0 and 1, such as 0.01")
    problem = problem_of(model, shape, op, dtype, engine=engine)
    roots = [None if name == "none" else Path(name) for name in (a, b)]
    for root in roots:
        ConfigTree(root)  # refuses what is no folder before a child is started
    source, interpreter = source_of(routing), interpreter_of(python)
    interpreted = interpreter_env()
    sizes = parse_sizes(batch_sizes, FEW_SIZES) if interpreted else parse_sizes(batch_sizes)
    progress = Progress(launches, quiet=as_json and not sys.stderr.isatty())

    def look(hello: dict[str, Any]) -> tuple[Lookup, Lookup]:
        device, triton = device_name_of(hello), hello["versions"]["triton"]
        own = {int(size): config for size, config in hello["kernel"]["defaults"].items()}
        first, second = (lookup(problem, root, device, triton, own.get) for root in roots)
        return first, second

    with tempfile.TemporaryDirectory(prefix="tuner-compare-") as folder:
        env = {**interpreted, "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(Path(folder) / "cache"))}
        spec = ChildSpec(Path(folder), interpreter, env)
        options = LiveOptions(engine, seed, 1 if interpreted else 5, source, not interpreted)
        rows = compare(
            spec, problem, options, look, sizes, launches=launches, rounds=rounds, margin=margin, report=progress.step
        )
    progress.end()
    if as_json:
        print_json({"a": a, "b": b, "interpreter": bool(interpreted), "batch_sizes": [to_json(row) for row in rows]})
    else:
        _print(rows, a, b, bool(interpreted))
    return Exit.REGRESSION if any(row.verdict == "regressed" for row in rows) else Exit.OK


def _print(rows: list[Compared], a: str, b: str, interpreted: bool) -> None:
    print(f"A {a}\nB {b}")
    if interpreted:
        print(INTERPRETED)
    print(f"{'M':>6} {'A us':>12} {'B us':>12} {'A/B':>7} {'interval':>17}  verdict of B")
    for row in rows:
        span = f"{row.low:.3f} .. {row.high:.3f}"
        print(f"{row.batch_size:>6} {row.a_us:>12.1f} {row.b_us:>12.1f} {row.ratio:>7.3f} {span:>17}  {row.verdict}")
    levels = {row.level for row in rows if row.verdict != "same config"}
    if levels:
        few = "; a verdict takes 5 launches or more" if min(levels) < LEAST_LEVEL else ""
        print(f"intervals hold at {100 * min(levels):.1f} %{few}")
