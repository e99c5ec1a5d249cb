"""Open the pools of a plan on this host: isolation, devices, CPU sets, Ray. What cannot be opened is down, with why."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from moegate.errors import MoegateError, PoolError
from moegate.records import Plan, PoolSpec
from orchestrator.pools import discovery
from orchestrator.pools.isolation import Isolation
from orchestrator.pools.isolation.choose import choose
from orchestrator.pools.isolation.process import ProcessIsolation
from orchestrator.pools.leases import Allocator, Pool, open_pool
from orchestrator.pools.slots import Slot

__all__ = ["Site", "open_site"]


@dataclass(frozen=True)
class Site:
    """Where a run happens: its pools with their isolation, and why a pool that is not there is down."""

    pools: Mapping[str, Pool]
    isolations: Mapping[str, Isolation]
    host: Isolation
    down: Mapping[str, str] = field(default_factory=dict)

    def kinds(self) -> list[Isolation]:
        """Each isolation once, for reaping."""
        return list({isolation.name: isolation for isolation in (self.host, *self.isolations.values())}.values())


@contextmanager
def open_site(
    plan: Plan, *, isolation: str | None, root: Path, logs: Path, say: Callable[[str], None], run: str = ""
) -> Iterator[Site]:
    """Open the pools that the plan's cells use, and close them afterwards.

    A pool that cannot be opened does not stop the others: its cells will end BLOCKED. `run`: the run directory, which
    others that want its devices are told.
    """
    used = {cell.pool for cell in plan.cells}
    specs = [pool for pool in plan.pools if pool.name in used]
    chosen = choose(specs, plan.images, override=isolation, root=root, logs=logs, say=say)
    isolations = {name: found for name, found in chosen.items() if not isinstance(found, str)}
    down = {name: found for name, found in chosen.items() if isinstance(found, str)}
    pools: dict[str, Pool] = {}
    with ExitStack() as stack:
        _open(specs, pools, down, stack, run)
        for pool in pools.values():
            stack.callback(pool.close)
        for name, reason in down.items():
            say(f"pool {name} is down: {reason}")
        yield Site(pools, isolations, ProcessIsolation(), down)


def _open(specs: Sequence[PoolSpec], pools: dict[str, Pool], down: dict[str, str], stack: ExitStack, run: str) -> None:
    wanted = [spec for spec in specs if spec.name not in down]
    try:
        cpus = _cpu_sets(wanted)
    except PoolError as error:
        down.update({spec.name: str(error) for spec in wanted})
        return
    # Devices first: a Ray cluster is not started for a pool that this host cannot have.
    for spec in wanted:
        try:
            pools[spec.name] = open_pool(spec, _plain, cpus[spec.name], run)
        except MoegateError as error:
            down[spec.name] = str(error)
    _attach_ray([pool for pool in pools.values() if pool.spec.ray != "none"], pools, down, stack)


def _plain(spec: PoolSpec, slots: Sequence[Slot]) -> Allocator | None:
    del spec, slots
    return None


def _attach_ray(through_ray: Sequence[Pool], pools: dict[str, Pool], down: dict[str, str], stack: ExitStack) -> None:
    """Let Ray count the slots of these pools. One Ray per run: all of them must name the same one."""
    if not through_ray:
        return
    from orchestrator.pools.ray_apart import RayService, Share

    addresses = {pool.spec.ray for pool in through_ray}
    try:
        if len(addresses) > 1:
            raise PoolError(f"one run uses one Ray, the pools name {len(addresses)}: {', '.join(sorted(addresses))}")
        service = RayService([pool.spec for pool in through_ray])
        stack.callback(service.stop)
        for pool in through_ray:
            pool.attach(Share(service, pool.spec.name))
    except PoolError as error:
        for pool in through_ray:
            down[pool.spec.name] = str(error)
            del pools[pool.spec.name]


def _cpu_sets(specs: Sequence[PoolSpec]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Disjoint CPU sets for all slots of the run. Slots of a GPU go without one where the host has too few CPUs."""
    total = sum(spec.slots for spec in specs)
    if not total:
        return {}
    cpu_slots = sum(spec.slots for spec in specs if spec.device == "cpu")
    if total > len(os.sched_getaffinity(0)):
        sets = discovery.cpu_sets(cpu_slots) if cpu_slots else ()
        total = cpu_slots
    else:
        sets = discovery.cpu_sets(total)
    out: dict[str, tuple[tuple[int, ...], ...]] = {}
    at = 0
    for spec in sorted(specs, key=lambda spec: spec.device != "cpu"):
        out[spec.name] = sets[at : at + spec.slots] if at + spec.slots <= total else ()
        at += spec.slots
    return out
