"""One attempt: one stage of one cell on one lease. It runs launches, believes none unseen, and writes one result.

Everything an attempt does lies in its own folder until it is done: result.json is renamed into place last, and only
the caller's `done` entry in the journal makes it count.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from moegate import records
from moegate.canonical import file_digest
from moegate.devices import normalise
from moegate.errors import InfraError, UsageError
from moegate.paths import ensure_inside, is_file, is_folder, remove_folder
from moegate.records import DeviceIdentity, Launch, Measurement
from moegate.stats import Rules, Turn, log_ratio, next_stage, turns
from orchestrator.cells import KINDS, Kind, Work, wrong_kernels, wrong_proof
from orchestrator.cells.tune import OUTPUT
from orchestrator.pools.isolation import LaunchResult, LaunchSpec
from orchestrator.scheduler import classify
from orchestrator.scheduler.classify import Ending
from orchestrator.scheduler.installing import environments
from orchestrator.scheduler.job import AttemptDone, AttemptJob
from orchestrator.scheduler.logs import heading, keep_logs, mask_logs
from orchestrator.scheduler.merge import merge
from orchestrator.scheduler.progress import pair_line
from orchestrator.scheduler.resident import alone, explained, is_resident, run_together
from orchestrator.scheduler.rundir import MAX_RESULT_BYTES
from orchestrator.sources import Environment

__all__ = ["run_attempt"]

MAX_OUTPUT_BYTES = 256 << 20
_FULL_BYTES = 256 << 10
_VOID_EXTRA = 3  # void pairs that a stage may run again, besides half of its own number


class _Over(Exception):
    """The attempt ends here, with this ending."""

    def __init__(self, ending: Ending) -> None:
        self.ending = ending
        super().__init__(ending.reason)


def run_attempt(job: AttemptJob) -> AttemptDone:
    """Run an attempt to its end. What its children do never raises; a full disk or a lost daemon does.

    Raises:
        InfraError: the orchestrator itself cannot go on.
    """
    began = time.monotonic()
    attempt = _Attempt(job)
    done = attempt.done
    try:
        job.folder.mkdir(parents=True)
        attempt.launches()
        done.result = attempt.finish()
        done.result_sha256 = file_digest(done.result)
        done.state = "PASSED"
    except _Over as over:
        done.state, done.reason, done.retry = over.ending.state, over.ending.reason, over.ending.retry
        _blame_the_disk(job, attempt)
        attempt.finish_failed()
    except InfraError as error:
        cancelled = job.cancel.is_set()
        done.state, done.reason = "CANCELLED" if cancelled else "INFRA_ERROR", str(error)
        done.retry = not cancelled
    except OSError as error:
        raise InfraError(f"{job.folder}: {error.strerror or error}") from error
    done.wall_s = round(time.monotonic() - began, 3)
    attempt.tidy()
    mask_logs(job.folder)
    return done


def _blame_the_disk(job: AttemptJob, attempt: _Attempt) -> None:
    """A cell that failed on a full disk: its own fault where the disk is free again without its files, else the host's.

    Raises:
        InfraError: there is no room for anybody, so the run ends here and can be resumed.
    """
    done = attempt.done
    if done.state != "FAILED" or shutil.disk_usage(job.folder).free >= _FULL_BYTES:
        return
    attempt.tidy()
    if shutil.disk_usage(job.folder).free < _FULL_BYTES:
        raise InfraError(f"{job.folder}: No space left on device")
    done.reason = f"it filled the disk: {done.reason}"


class _Attempt:
    """The state of one attempt while it runs."""

    def __init__(self, job: AttemptJob) -> None:
        self.job = job
        self.kind: Kind = KINDS[job.cell.kind]
        self.done = AttemptDone("FAILED")
        self.measurements: list[Measurement] = []
        self.pairs: dict[int, list[Launch]] = {}
        self.sources: dict[str, Environment] = {}
        self._number = 0

    # Which launches

    def launches(self) -> None:
        """Run the launches that the kind and the stage ask for."""
        cell = self.job.cell
        self.sources = environments(self.job)
        if not self.kind.arms:
            self.measurements.append(self._launch(None, None))
        elif self.kind.paired:
            self._stage()
        else:
            for order, name in enumerate(dict.fromkeys(cell.arms)):
                self.measurements.append(self._launch(name, Turn(pair=0, order=order, arm=name)))

    def _stage(self) -> None:
        """Pairs in ABBA order until the stage has what it needs. A void pair is run again, a few times."""
        job, rules = self.job, self.job.rules
        assert rules is not None
        wanted = rules.screen if job.stage == "screen" else rules.confirm
        arms = (job.cell.arms[0], job.cell.arms[1])
        plan = turns(wanted + wanted // 2 + _VOID_EXTRA, f"{job.seed}:{job.cell.id}:{job.stage}", arms)
        ratios: list[float] = []
        voids: list[str] = []
        for first, second in zip(plan[::2], plan[1::2], strict=True):
            if len(ratios) >= wanted:
                break
            if job.stage == "confirm" and ratios and (job.out_of_time() or self._settled(ratios, rules)):
                break
            found = self._pair(first, second, arms)
            if isinstance(found, float):
                ratios.append(found)
            else:
                voids.append(found)
            self.done.ratios = tuple(ratios)
            number = str(first.pair + 1) + (f" of {wanted}" if not voids else f" ({len(ratios)} of {wanted} valid)")
            launches = [launch for measurement in self.measurements[-2:] for launch in measurement.launches]
            job.log(f"{job.stage} pair {number}: {pair_line(found, launches, arms, job.metric)}")
        if len(ratios) < wanted and len(voids) > wanted // 2 + _VOID_EXTRA - 1:
            raise _Over(Ending("INFRA_ERROR", f"{len(voids)} void pairs, last: {voids[-1]}", retry=True))

    def _settled(self, ratios: list[float], rules: Rules) -> bool:
        return next_stage(self.job.screen, ratios, rules).stage == "done"

    def _pair(self, first: Turn, second: Turn, arms: tuple[str, str]) -> float | str:
        if is_resident(self.job.cell):
            found = self._together((first, second))
        else:
            found = [self._launch(turn.arm, turn) for turn in (first, second)]
        self.measurements += found
        return log_ratio([launch for measurement in found for launch in measurement.launches], arms, self.job.metric)

    def _together(self, both: tuple[Turn, Turn]) -> list[Measurement]:
        """The two launches of a pair, up at the same time, with loads in turn."""
        job = self.job
        prepared = [self._prepare(turn.arm, turn) for turn in both]
        ended = run_together(job.isolation, [spec for _, spec in prepared], job.cancel)
        self.done.commands += [end.result.command or spec.argv for (_, spec), end in zip(prepared, ended, strict=True)]
        found = {}
        try:
            # What ended first is why the other was stopped.
            for index in sorted(range(len(ended)), key=lambda i: ended[i].place):
                found[index] = self._believe(*prepared[index], ended[index].result)
        except _Over as over:
            raise _Over(explained(over.ending, job.cancel.is_set())) from None
        finally:
            for (_, spec), turn in zip(prepared, both, strict=True):
                heading(job.folder / "stderr.log", spec.number, turn)
                keep_logs(spec, job.folder)
        return [self._place(found[index], turn) for index, turn in enumerate(both)]

    # One launch

    def _launch(self, arm: str | None, turn: Turn | None) -> Measurement:
        """Run one launch and return its measurement, with arm, pair, order and stage filled in."""
        work, spec = self._prepare(arm, turn)
        heading(spec.stderr, spec.number, turn)
        result = self.job.isolation.run(spec, on_start=lambda kind, ident: None, cancel=self.job.cancel)
        self.done.commands.append(result.command or spec.argv)
        measurement = self._believe(work, spec, result)
        return self._place(measurement, turn)

    def _prepare(self, arm: str | None, turn: Turn | None) -> tuple[Work, LaunchSpec]:
        """Make one launch's folder and command, and write it into the journal."""
        job = self.job
        if job.cancel.is_set():
            raise _Over(Ending("CANCELLED", "stopped on request"))
        number, self._number = self._number, self._number + 1
        folder = job.folder / f"launch-{number:03d}"
        folder.mkdir()
        if job.adopt is not None and (job.adopt / OUTPUT).is_dir() and number == 0:
            os.rename(job.adopt / OUTPUT, folder / OUTPUT)  # noqa: PTH104 - a tuner's own journal goes on where it was
        work = Work(
            cell=job.cell,
            model=job.model,
            pool=job.pool,
            arm=job.arms.get(arm or ""),
            configs=job.trees.get(arm or ""),
            folder=folder,
            seed=job.seed,
            programs=job.programs,
        )
        spec = self._spec(work, number)
        job.before_launch(number, turn)
        return work, spec if not is_resident(job.cell) else alone(spec)

    def _spec(self, work: Work, number: int) -> LaunchSpec:
        job = self.job
        command = self.kind.command(work)
        env = {**(job.image.env if job.image else {}), **(work.arm.env if work.arm else {})}
        source = self.sources.get(work.arm.name) if work.arm else None
        to_file = self.kind.collect is not None
        return LaunchSpec(
            run=job.run,
            cell=job.cell.id,
            attempt=job.number,
            number=number,
            argv=command.argv,
            workdir=work.folder,
            stdout=work.folder / "stdout.json" if to_file else job.folder / "stdout.log",
            stderr=job.folder / "stderr.log",
            timeout_s=job.cell.timeout_s,
            slot=job.slot,
            env=env,
            reads=command.reads if source is None else (*command.reads, source.root),
            image=job.image,
            python=None if source is None else source.python,
            network=command.network,
            interpret=job.slot.device.identity.kind == "cpu" and not self.kind.host,
        )

    def _believe(self, work: Work, spec: LaunchSpec, result: LaunchResult) -> Measurement:
        """The launch's measurement, if it ended well and holds what it must; else the attempt is over."""
        stderr = classify.tail(spec.stderr)
        over = classify.ending(result, stderr, spec.timeout_s)
        if over is not None and not (over.state == "FAILED" and result.returncode == 1):
            raise _Over(over)
        try:
            measurement = self._read(work, result.returncode or 0)
        except UsageError as error:
            if over is not None:
                raise _Over(over) from None
            raise _Over(Ending("FAILED", f"exit 0 without a valid result: {error.message}")) from None
        if measurement.status != "ok":
            self.measurements.append(measurement)
            self.done.reason = measurement.failure or ""
            raise _Over(Ending("FAILED", measurement.failure or "the result says that it failed"))
        if over is not None:
            raise _Over(over)
        self._check(work, measurement)
        return measurement

    def _read(self, work: Work, returncode: int) -> Measurement:
        if self.kind.collect is not None:
            _plain_file(work.folder / "stdout.json")
            return self.kind.collect(work, returncode)
        _plain_file(work.out)
        return records.read(Measurement, work.out)

    def _check(self, work: Work, measurement: Measurement) -> None:
        """Everything that a result must hold before it counts."""
        cell = self.job.cell
        if measurement.kind != cell.kind:
            raise _Over(Ending("FAILED", f"the result is of kind {measurement.kind}"))
        if not any(count > 0 for count in measurement.work.values()):
            raise _Over(Ending("FAILED", "nothing was done: all counts of work are zero"))
        for name, digest in measurement.outputs.items():
            try:
                path = ensure_inside(work.folder, Path(name))
            except UsageError:
                raise _Over(Ending("FAILED", f"declared output {name[:100]!r} leads outside its folder")) from None
            try:
                good = is_file(path) and path.stat().st_size <= MAX_OUTPUT_BYTES and file_digest(path) == digest
            except OSError as error:
                words = f"declared output {name[:100]!r} cannot be read: {error.strerror}"
                raise _Over(Ending("FAILED", words)) from None
            if not good:
                raise _Over(Ending("FAILED", f"declared output {name[:100]!r} is missing, too large or differs"))
        wrong = self._wrong_device(measurement)
        if wrong is None and self.kind.arms:
            wrong = wrong_proof(work, measurement) or self._wrong_source(work, measurement)
        if wrong is not None:
            # Trying again would measure the same wrong thing; a person has to look.
            raise _Over(Ending("INFRA_ERROR", f"proof: {wrong}", retry=False))
        reason = self.kind.judge(work, measurement)
        if reason is not None:
            self.measurements.append(measurement)
            raise _Over(Ending("FAILED", reason))

    def _wrong_device(self, measurement: Measurement) -> str | None:
        if self.kind.host:
            return None
        mine = self.job.slot.device.identity
        for device in (measurement.device, *(launch.device for launch in measurement.launches)):
            if device.kind != mine.kind:
                return f"asked for a {mine.kind} device, the launch ran on {device.kind}"
            if mine.kind != "cpu" and device.identity != mine.identity:
                return f"asked for device {mine.identity}, the launch ran on {device.identity}"
            if mine.kind != "cpu" and normalise(device.name) != normalise(mine.name):
                return f"asked for {mine.name}, the launch ran on {device.name}"
        return None

    def _wrong_source(self, work: Work, measurement: Measurement) -> str | None:
        source = self.sources.get(work.arm.name) if work.arm else None
        return None if source is None else wrong_kernels(source.sha, source.kernel_hash, measurement)

    def _place(self, measurement: Measurement, turn: Turn | None) -> Measurement:
        """Fill in what only the scheduler knows, and name a CPU by its slot."""
        launches = tuple(
            replace(
                launch,
                device=self._device(launch.device),
                arm=turn.arm if turn else None,
                pair=turn.pair if turn else None,
                order=turn.order if turn else None,
                stage=self.job.stage if turn and self.job.stage != "only" else None,
                detail=self._detail(launch, turn),
            )
            for launch in measurement.launches
        )
        return replace(measurement, launches=launches, device=self._device(measurement.device))

    def _detail(self, launch: Launch, turn: Turn | None) -> dict[str, Any]:
        source = self.sources.get(turn.arm) if turn else None
        return launch.detail if source is None else {**launch.detail, "source": source.sha}

    def _device(self, device: DeviceIdentity) -> DeviceIdentity:
        if device.kind != "cpu":
            return device
        return replace(device, identity=self.job.slot.device.identity.identity)

    # The end

    def finish(self) -> Path:
        """Merge the measurements and write the result, in place and durable."""
        self._keep_outputs()
        result = self.job.folder / "result.json"
        merged = merge(self.job, self.measurements)
        self.done.device = merged.device.identity
        try:
            records.write(result, merged)
        except ValueError:
            raise _Over(Ending("FAILED", "the result holds a number that is not finite")) from None
        if result.stat().st_size > MAX_RESULT_BYTES:
            result.unlink()
            raise _Over(Ending("FAILED", f"the result is larger than {MAX_RESULT_BYTES >> 20} MiB"))
        return result

    def finish_failed(self) -> None:
        """Keep what a failed attempt measured, for the report; it never counts."""
        if self.measurements:
            merged = replace(merge(self.job, self.measurements), status="failed", failure=self.done.reason or None)
            try:
                records.write(self.job.folder / "result.json", merged)
            except ValueError:
                return

    def _keep_outputs(self) -> None:
        """Move a tune cell's tree to the attempt's own level, after a look at what it holds."""
        if self.job.cell.kind != "tune":
            return
        tree = self.job.folder / "launch-000" / OUTPUT
        size = 0
        for path in (tree, *tree.rglob("*")):
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise _Over(Ending("FAILED", f"{path.name[:100]!r} in the tuned tree is not a plain file"))
            if not os.access(path, os.R_OK | (os.W_OK | os.X_OK if stat.S_ISDIR(mode) else 0)):
                raise _Over(Ending("FAILED", f"{path.name[:100]!r} in the tuned tree cannot be read, or moved"))
            size += path.lstat().st_size
        if size > MAX_OUTPUT_BYTES:
            raise _Over(Ending("FAILED", f"the tuned tree is larger than {MAX_OUTPUT_BYTES >> 20} MiB"))
        os.rename(tree, self.job.folder / OUTPUT)  # noqa: PTH104

    def tidy(self) -> None:
        """Remove the launches' working files; of a failed tune keep the tree, from which the next attempt goes on."""
        keep = self.job.cell.kind == "tune" and self.done.state != "PASSED"
        for folder in self.job.folder.glob("launch-*") if self.job.folder.is_dir() else ():
            if not (keep and is_folder(folder / OUTPUT)):
                remove_folder(folder)


def _plain_file(path: Path) -> None:
    """Refuse links, pipes and devices where a result should be: reading one could hang or lead elsewhere."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        raise UsageError("no result was written", file=path) from None
    if not stat.S_ISREG(mode):
        raise UsageError("the result is not a plain file", file=path)
