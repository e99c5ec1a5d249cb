"""The scheduler: what may run now, on which slot, and what follows from how it ended.

One thread decides; each running attempt has a thread of its own that does nothing but wait for children. Every step is
in the journal before it is taken, so the state after a crash is what the journal says and nothing else.
"""

from __future__ import annotations

import bisect
import functools
import queue
import shutil
import threading
import time

from moegate.errors import InfraError, MoegateError
from moegate.journal import Journal
from moegate.records import ArmSpec, ImageSpec, Plan, PlannedCell, PoolSpec, State
from moegate.stats import Rules, Turn, next_stage
from orchestrator.cells import KINDS
from orchestrator.cells.base import PROGRAMS, Programs
from orchestrator.cells.tune import OUTPUT
from orchestrator.pools.isolation import Isolation
from orchestrator.pools.leases import Lease
from orchestrator.pools.site import Site
from orchestrator.pools.slots import Slot
from orchestrator.scheduler import keys, recover
from orchestrator.scheduler.attempt import run_attempt
from orchestrator.scheduler.job import AttemptDone, AttemptJob, Stage
from orchestrator.scheduler.progress import Progress
from orchestrator.scheduler.rundir import RunDir
from orchestrator.scheduler.state import CellHistory, read_cells
from orchestrator.scheduler.todo import Running, Todo, host_slot
from orchestrator.scheduler.trees import Trees
from orchestrator.sources import Sources

__all__ = ["Scheduler"]

_WAIT_S = 0.25


class Scheduler:
    """Runs a plan in a run directory that this process holds."""

    def __init__(
        self,
        plan: Plan,
        rundir: RunDir,
        journal: Journal,
        site: Site,
        *,
        run: str,
        rules: Rules,
        progress: Progress,
        trees: Trees,
        sources: Sources,
        programs: Programs = PROGRAMS,
        retry_pause_s: float = 1.0,
    ) -> None:
        self.plan, self.rundir, self.journal, self.site = plan, rundir, journal, site
        self.run, self.rules, self.progress, self.programs = run, rules, progress, programs
        self.trees, self.sources = trees, sources
        self.cancel = threading.Event()
        self.stop_reason = ""
        self.executed = 0
        self._retry_pause_s = retry_pause_s
        self._began = time.monotonic()
        self._cells = {cell.id: cell for cell in plan.cells}
        self._place = {cell.id: index for index, cell in enumerate(plan.cells)}
        self._arms: dict[str, ArmSpec] = {arm.name: arm for arm in plan.arms}
        self._waiting: list[Todo] = []  # in order of priority
        self._changed = True  # whether something may have become hopeless since that was looked for
        self._numbers: dict[str, int] = {}
        self._tried: set[tuple[str, str]] = set()
        self._running: dict[str, Running] = {}
        self._final: dict[str, State] = {}
        self._ended: queue.Queue[tuple[Running, AttemptDone | BaseException]] = queue.Queue()
        self._said: dict[str, str] = {}

    # The loop

    def work(self) -> None:
        """Run everything that is not finished, to the end, the budget or `cancel`.

        Raises:
            InfraError: the journal or the run directory cannot be written any more. All children are ended first.
        """
        cells = read_cells(self.journal.entries)
        self._numbers = {
            name: max(attempt.number for attempt in cell.attempts) for name, cell in cells.items() if cell.attempts
        }
        self._tried = {(name, attempt.stage) for name, cell in cells.items() for attempt in cell.attempts}
        self._recover(cells)
        self.progress.begins()
        try:
            while self._waiting or self._running:
                self._check_stop()
                self._start_what_can()
                self._take_ended()
        except BaseException:
            self.cancel.set()
            self._drain()
            raise

    def stop(self, reason: str) -> None:
        """Ask the run to end: nothing new starts, running launches are ended, everything finished is kept."""
        self.stop_reason = self.stop_reason or reason
        self.cancel.set()

    def _check_stop(self) -> None:
        if not self.cancel.is_set() and self.rundir.cancel_file.exists():
            self.stop("cancelled by `orchestrator cancel`")
        if self.cancel.is_set():
            waiting, self._waiting = self._waiting, []
            for todo in waiting:
                self._finish(todo.cell, "CANCELLED", self.stop_reason or "stopped")
        elif self._out_of_time():
            waiting, self._waiting = self._waiting, []
            for todo in waiting:
                self._over_budget(todo)

    def _over_budget(self, todo: Todo) -> None:
        """The clock stopped it: a cell that has its screen keeps that as its result, another has none."""
        budget = self.plan.gate.budget_s or 0.0
        if todo.stage == "confirm":
            self._finish(todo.cell, "PASSED", f"the budget of {budget:g} s ended before confirmation")
        else:
            self._finish(todo.cell, "CANCELLED", f"the budget of {budget:g} s ended before it began")

    def _out_of_time(self) -> bool:
        budget = self.plan.gate.budget_s
        return budget is not None and time.monotonic() - self._began > budget

    def _drain(self) -> None:
        """Wait for the threads of running attempts; their children are being ended. Nothing is written any more."""
        deadline = time.monotonic() + 30.0
        while self._running and time.monotonic() < deadline:
            try:
                running, _ = self._ended.get(timeout=_WAIT_S)
            except queue.Empty:
                continue
            self._running.pop(running.todo.cell.id, None)
            if running.lease is not None:
                running.lease.release()

    # Where everything stands

    def _recover(self, histories: dict[str, CellHistory]) -> None:
        """Decide for each cell what is finished and what has to be done; a cell after those that it needs."""
        again = recover.RunAgain()
        for cell in sorted(self.plan.cells, key=lambda cell: (bool(cell.needs), self._place[cell.id])):
            history = histories.get(cell.id) or CellHistory(cell.id)
            recover.close_cut_off(self.journal, history)
            self._recover_cell(cell, history, again)
        if said := again.line():
            self.progress.note(said)

    def _recover_cell(self, cell: PlannedCell, history: CellHistory, again: recover.RunAgain) -> None:
        key, hold = functools.partial(self._key, cell), self._needs_hold(cell)
        found = recover.standing(cell, history, needs_hold=hold, key=key, rundir=self.rundir, rules=self.rules)
        if isinstance(found, recover.Owed):
            again.add(history, found, key if hold else None)
            if found.stage == "confirm":
                self.progress.screened(cell, found.screen_s)
            adopt = recover.adoptable(cell, history, key=key, rundir=self.rundir)
            place = self._place[cell.id]
            self._add(Todo(cell, found.stage, place, found.device, found.screen, adopt=adopt))
        elif history.final is None or history.final[0] != found.state:
            self._finish(cell, found.state, found.reason)
        else:
            self._final[cell.id] = found.state  # the journal says so already
            self.progress.kept(cell)

    def _needs_hold(self, cell: PlannedCell) -> bool:
        return all(self._final.get(need) == "PASSED" for need in cell.needs)

    # Starting

    def _add(self, todo: Todo) -> None:
        bisect.insort(self._waiting, todo, key=lambda item: item.priority)
        self._changed = True
        self.progress.owes(todo.cell, todo.stage)

    def _start_what_can(self) -> None:
        """Give every free slot to the first cell that may have it."""
        if self._changed:
            self._changed = False
            self._block_hopeless()
        started: list[Todo] = []
        full: set[str] = set()
        for todo in self._waiting:
            if todo.cell.pool in full or not self._may_start(todo):
                continue
            slot, lease = self._lease(todo)
            if slot is not None:
                started.append(todo)
                self._start(todo, slot, lease)
            if todo.cell.pool is not None and self.site.pools[todo.cell.pool].busy():
                full.add(todo.cell.pool)
                if len(full) == len(self.site.pools) and not KINDS[todo.cell.kind].host:
                    break
        for todo in started:
            self._waiting.remove(todo)
        for open_pool in self.site.pools.values():
            open_pool.settle()

    def _block_hopeless(self) -> None:
        """Cells whose needs have failed, and cells of pools that are down, end as BLOCKED."""
        for todo in list(self._waiting):
            failed = [need for need in todo.cell.needs if self._final.get(need, "PASSED") != "PASSED"]
            reason = f"needs {self._cells[failed[0]].label}, which ended {self._final[failed[0]]}" if failed else ""
            pool = todo.cell.pool
            if not reason and pool is not None:
                if pool in self.site.down:
                    reason = f"pool {pool} is down: {self.site.down[pool]}"
                elif not self.site.pools[pool].alive(todo.device):
                    reason = f"no device of pool {pool} is left"
            if reason:
                self._waiting.remove(todo)
                self._finish(todo.cell, "BLOCKED", reason)

    def _may_start(self, todo: Todo) -> bool:
        if not self._needs_hold(todo.cell):
            return False
        # Work on the host itself would disturb a measurement on its processor, and the other way round.
        host = KINDS[todo.cell.kind].host
        for running in self._running.values():
            other = KINDS[running.todo.cell.kind].host
            if host and (other or running.slot.device.identity.kind == "cpu"):
                return False
            if other and todo.cell.pool and self.site.pools[todo.cell.pool].spec.device == "cpu":
                return False
        return True

    def _lease(self, todo: Todo) -> tuple[Slot | None, Lease | None]:
        if todo.cell.pool is None:
            return host_slot(), None
        pool = self.site.pools[todo.cell.pool]
        lease = pool.take(todo.device)
        if lease is None:
            if pool.holder and self._said.get(pool.spec.name) != pool.holder:
                self._said[pool.spec.name] = pool.holder
                self.progress.note(f"waiting: {pool.holder}")
            return None, None
        return lease.slot, lease

    def _start(self, todo: Todo, slot: Slot, lease: Lease | None) -> None:
        cell = todo.cell
        isolation = self._isolation(cell)
        key = self._key(cell)
        number = self._next_number(cell)
        device = slot.device.identity.identity
        self.journal.append("lease", cell=cell.id, stage=todo.stage, attempt=number, slot=slot.name, device=device,
                            key=key.value, parts=dict(key.parts), isolation=isolation.name)  # fmt: skip
        running = Running(todo, lease, slot, number, key.value)
        self._running[cell.id] = running
        self.executed += 1
        self.progress.started(cell, todo.stage, number, slot, again=(cell.id, todo.stage) in self._tried)
        self._tried.add((cell.id, todo.stage))
        job = self._job(running, isolation)
        threading.Thread(target=self._body, args=(running, job), name=f"cell-{cell.id}", daemon=True).start()

    def _body(self, running: Running, job: AttemptJob) -> None:
        try:
            self._ended.put((running, run_attempt(job)))
        except BaseException as error:
            self._ended.put((running, error))

    def _job(self, running: Running, isolation: Isolation) -> AttemptJob:
        cell, number = running.todo.cell, running.number
        pool, image = self._pool_of(cell)

        def before_launch(launch: int, turn: Turn | None) -> None:
            more = {} if turn is None else {"arm": turn.arm, "pair": turn.pair, "order": turn.order}
            self.journal.append("launch", cell=cell.id, attempt=number, number=launch, **more)

        return AttemptJob(
            run=self.run,
            cell=cell,
            stage=running.todo.stage,
            number=number,
            folder=self.rundir.attempt(cell.id, number),
            slot=running.slot,
            isolation=isolation,
            model=next((model for model in self.plan.models if model.name == cell.model), None),
            pool=pool,
            image=image,
            arms={name: self._arms[name] for name in cell.arms},
            trees={name: self.trees.path(self._arms[name], cell) for name in cell.arms},
            rules=self.rules if KINDS[cell.kind].paired else None,
            metric=self.plan.gate.metric.get(cell.kind),
            seed=self.plan.seed,
            screen=running.todo.screen,
            programs=self.programs,
            sources=self.sources,
            cancel=self.cancel,
            out_of_time=self._out_of_time,
            before_launch=before_launch,
            log=lambda text: self.progress.step(cell, text),
            adopt=running.todo.adopt,
        )

    def _pool_of(self, cell: PlannedCell) -> tuple[PoolSpec | None, ImageSpec | None]:
        pool = next((pool for pool in self.plan.pools if pool.name == cell.pool), None)
        return pool, next((image for image in self.plan.images if pool is not None and image.name == pool.image), None)

    def _isolation(self, cell: PlannedCell) -> Isolation:
        return self.site.host if cell.pool is None else self.site.isolations[cell.pool]

    def _next_number(self, cell: PlannedCell) -> int:
        """One more than any attempt that the journal or the disk knows: a number is never used twice."""
        last = max(self._numbers.get(cell.id, 0), self.rundir.last_attempt(cell.id))
        self._numbers[cell.id] = last + 1
        return last + 1

    def _key(self, cell: PlannedCell) -> keys.Key:
        _, image = self._pool_of(cell)
        detail = self._isolation(cell).detail if cell.pool not in self.site.down else {}
        trees = {name: self.trees.digest(self._arms[name], cell) for name in cell.arms}
        return keys.key(self.plan, cell, env=image.env if image else {}, image=detail, trees=trees)

    # Ending

    def _take_ended(self) -> None:
        """Wait a moment for an attempt to end, and act on every one that has."""
        try:
            running, done = self._ended.get(timeout=_WAIT_S if self._running else 0.05 if self._waiting else 0.0)
        except queue.Empty:
            return
        self._running.pop(running.todo.cell.id, None)
        try:
            if isinstance(done, BaseException):
                raise done if isinstance(done, MoegateError) else InfraError(f"{type(done).__name__}: {done}") from done
            self._end(running, done)
        finally:
            if running.lease is not None:
                running.lease.release()

    def _end(self, running: Running, done: AttemptDone) -> None:
        """Write the attempt's end, then what follows from it."""
        todo, cell = running.todo, running.todo.cell
        if done.state == "PASSED" and cell.kind == "tune":
            self._publish(cell, running.number)
        relative = None if done.result is None else str(done.result.relative_to(self.rundir.path))
        self.journal.append(
            "done", cell=cell.id, attempt=running.number, stage=todo.stage, state=done.state, reason=done.reason,
            wall_s=done.wall_s, result=relative, sha256=done.result_sha256, ratios=list(done.ratios),
            commands=[list(command) for command in done.commands[:2]],
        )  # fmt: skip
        self.progress.ended(cell, todo.stage, done)
        if done.state == "DEVICE_LOST" and running.lease is not None:
            said = self.site.pools[running.slot.pool].withdraw(running.slot)
            if said is not None:
                self.progress.note(said)
            self._changed = True
        if done.retry and todo.tries < cell.retries and not self.cancel.is_set():
            self._again(todo, done)
        elif done.state != "PASSED":
            self._finish(cell, done.state, done.reason)
        elif todo.stage == "screen":
            self._after_screen(todo, running, done)
        else:
            self._finish(cell, "PASSED", "")

    def _again(self, todo: Todo, done: AttemptDone) -> None:
        # A lost device cannot be the one that confirms: the cell starts over where a device is left.
        stage: Stage = todo.stage
        device, screen = todo.device, todo.screen
        if done.state == "DEVICE_LOST" and stage == "confirm":
            stage, device, screen = "screen", None, ()
        self.progress.note(f"{todo.cell.label}: {done.state}, trying again ({done.reason})")
        self._add(Todo(todo.cell, stage, todo.place, device, screen, todo.tries + 1))
        self.cancel.wait(self._retry_pause_s)

    def _after_screen(self, todo: Todo, running: Running, done: AttemptDone) -> None:
        answer = next_stage(done.ratios, (), self.rules)
        if answer.stage != "confirm":
            self._finish(todo.cell, "PASSED", answer.reason)
            return
        device = running.slot.device.identity.identity
        self._add(Todo(todo.cell, "confirm", todo.place, device, done.ratios))

    def _publish(self, cell: PlannedCell, number: int) -> None:
        """Put a tuned tree in its place: the last step before the `done` entry that makes it count."""
        source, target = self.rundir.attempt(cell.id, number) / OUTPUT, self.rundir.configs(cell.id)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            shutil.rmtree(target)
        source.rename(target)
        self.trees.forget(cell.id)

    def _finish(self, cell: PlannedCell, state: State, reason: str) -> None:
        self.rundir.sweep_cell(cell.id, OUTPUT, resumable=cell.kind == "tune" and state != "PASSED")
        self.journal.append("final", cell=cell.id, state=state, reason=reason)
        self._final[cell.id] = state
        self._changed |= state != "PASSED"
        self.progress.finished(cell, state, reason)
