"""Compile in child processes, one target each: a compiler that aborts takes its process along, not the run."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tuner.compile.configs import FileJobs, jobs_of
from tuner.compile.foreign import Foreign
from tuner.compile.targets import Target, missing
from tuner.compile.worker import compile_config, compile_variant, start

__all__ = ["compile_files", "compile_jobs", "compile_variants"]

Row = dict[str, Any]
_SKIPPED: Row = {"shared": None, "registers": None, "spills": None, "block_loads": None}


def compile_variants(targets: Sequence[Target], names: Sequence[str], jobs: int, progress: Callable[[str], None],
                     foreign: Foreign | None = None) -> list[Row]:  # fmt: skip
    """Facts of every kernel of the named variants on every target; `foreign` compiles for those that we cannot."""
    rows: list[Row] = []
    for target in targets:
        reason, elsewhere = _who(target, foreign)
        if elsewhere is not None:
            progress(f"{target.name}: in {elsewhere.python}")
            rows += elsewhere.variants(target, names, jobs)
            continue
        if reason is not None:
            progress(f"{target.name}: skipped, {reason}")
            rows.append({"target": target.name, "kernel": None, "status": "skipped", "error": reason, **_SKIPPED})
            continue
        for name, result in _pooled(target, compile_variant, list(names), jobs):
            progress(f"{target.name}: {name}")
            rows += result if isinstance(result, list) else [_crashed({"variant": name, "target": target.name}, result)]
    return [_with_triton(row) for row in rows]


def _who(target: Target, foreign: Foreign | None) -> tuple[str | None, Foreign | None]:
    """Why nobody can compile for a target, or the other environment where only that can."""
    reason = missing(target)
    if reason is None or foreign is None:
        return reason, None
    other = foreign.reason(target)
    return (f"{reason}; {other}", None) if other is not None else (None, foreign)


def compile_files(files: Sequence[Path], targets: Sequence[Target], jobs: int, progress: Callable[[str], None],
                  foreign: Foreign | None = None) -> list[Row]:  # fmt: skip
    """One row per file and batch size, for the target of the file's device; one for what else is to say of a file."""
    found = [jobs_of(path, tuple(t.name for t in targets)) for path in files]
    rows = [_row(f, None, None, "skipped", f.reason) for f in found if f.reason is not None]
    rows += [
        {**_row(f, bad.batch_size, target, "failed", bad.error), "line": bad.line, "field": bad.field}
        for f in found for bad in f.refused for target in f.targets
    ]  # fmt: skip
    for target in targets:
        mine = [f for f in found if target.name in f.targets and f.reason is None]
        reason, elsewhere = _who(target, foreign)
        if reason is not None:
            rows += [_row(f, size, target.name, "skipped", reason) for f in mine for size, _ in f.entries]
            continue
        distinct = {job["key"]: job for f in mine for _, job in f.entries}
        compile_ = compile_jobs if elsewhere is None else elsewhere.jobs
        facts = compile_(target, distinct, jobs, progress)
        for f in mine:
            for size, job in f.entries:
                fact = {n: v for n, v in facts[job["key"]].items() if n != "key"}
                rows.append({**_row(f, size, target.name, "ok", None), **fact})
    return [_with_triton(row) for row in rows]


def compile_jobs(target: Target, work: dict[str, Row], jobs: int,
                 progress: Callable[[str], None]) -> dict[str, Row]:  # fmt: skip
    """Facts of compile jobs by key (`configs.jobs_of`), for a target that the installed Triton compiles for."""
    facts: dict[str, Row] = {}
    for number, (key, result) in enumerate(_pooled(target, _ByKey(work), list(work), jobs), 1):
        progress(f"{target.name}: {number} of {len(work)} distinct configs")
        facts[key] = _with_triton(result[0] if isinstance(result, list) and result else _crashed({}, result))
    return facts


class _ByKey:
    """A function with state that can be sent to another process."""

    def __init__(self, jobs: dict[str, Row]) -> None:
        self.jobs = jobs

    def __call__(self, key: str) -> list[Row]:
        """Compile the job of one key."""
        return compile_config(self.jobs[key])


def _row(file: FileJobs, size: int | None, target: str | None, status: str, error: str | None) -> Row:
    return {
        "file": file.file, "batch_size": size, "projection": file.projection, "target": target, "status": status,
        "error": error, "line": None, "field": None, **_SKIPPED,
    }  # fmt: skip


def _crashed(words: Row, error: Any) -> Row:
    return {**words, **_SKIPPED, "kernel": None, "status": "crashed", "error": f"the compiler's process died: {error}"}


def _with_triton(row: Row) -> Row:
    import triton

    return {"triton": triton.__version__, **row}


def _pooled(target: Target, work: Callable[[str], list[Row]], names: list[str],
            jobs: int) -> Iterator[tuple[str, Any]]:  # fmt: skip
    """(name, rows) of each piece of work, or (name, exception) where even a process of its own died of it."""
    left = list(names)
    workers = min(jobs, max(1, len(left)))
    while left:
        try:
            with _pool(target, workers) as pool:
                futures = [(name, pool.submit(work, name)) for name in left]
                for name, future in futures:
                    rows = future.result()
                    left.remove(name)
                    yield name, rows
        except BrokenProcessPool as error:
            if workers == 1:
                yield left.pop(0), error
            workers = 1  # alone, so that the culprit is known


def _pool(target: Target, workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=start, initargs=(target.name,))
