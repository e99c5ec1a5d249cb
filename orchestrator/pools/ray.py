"""Ray as an allocator: a placement group per slot, and nothing else. No task and no actor of ours runs on it.

Ray retries, reuses workers and swallows exit signals, so it is asked one question only: may this slot be used now? A
placement group answers that, across all drivers of a cluster, without starting a worker process. Launches are fresh
processes or containers of this host either way.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

from moegate.errors import PoolError
from moegate.records import PoolSpec
from orchestrator.pools.slots import Slot

__all__ = ["RayAllocator", "check_offer", "resource_name", "start", "stop"]

_INSTALL = "python -m pip install 'moegate[ray]', or write `ray: none` in the pool"
_WAIT_S = 1  # Ray reads whole seconds
_mutex = threading.Lock()
_folders: list[str] = []


def resource_name(pool: str) -> str:
    """The custom resource that counts a pool's slots; a cluster's nodes offer it under the same name."""
    return f"moegate_{pool}"


class RayAllocator:
    """The slots of one pool as placement groups."""

    def __init__(self, spec: PoolSpec) -> None:
        self._resource = resource_name(spec.name)
        self._held: dict[int, Any] = {}
        self._asked: dict[int, Any] = {}

    def take(self, slot: Slot) -> bool:
        """Reserve one unit of the pool's resource; False while the cluster has none free.

        A request stays in Ray's queue between calls, so that whoever asked first is served first.
        """
        from ray.util.placement_group import placement_group, placement_group_table

        with _mutex:
            group = self._asked.pop(slot.index, None)
            if group is None:
                group = placement_group([{self._resource: 1.0}], strategy="STRICT_PACK")
                ready = bool(group.wait(timeout_seconds=_WAIT_S))
            else:
                ready = placement_group_table(group)["state"] == "CREATED"
            (self._held if ready else self._asked)[slot.index] = group
            return ready

    def give(self, slot: Slot) -> None:
        """Remove the slot's placement group."""
        self._remove(slot.index)

    def close(self) -> None:
        """Remove what is left."""
        for index in [*self._held, *self._asked]:
            self._remove(index)

    def _remove(self, index: int) -> None:
        from ray.util.placement_group import remove_placement_group

        with _mutex:
            for groups in (self._held, self._asked):
                group = groups.pop(index, None)
                if group is not None:
                    remove_placement_group(group)


def stop() -> None:
    """End the local Ray, or leave the cluster."""
    import ray

    if ray.is_initialized():
        ray.shutdown()
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


def start(pools: Sequence[PoolSpec]) -> None:
    """Start a local Ray for these pools, or connect to the cluster that they name.

    Raises:
        PoolError: Ray is not installed, does not start, or does not offer the pool's slots.
    """
    address = pools[0].ray
    # Before the import: Ray reads these once. Its own worker output stays out of our terminal.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address == "local" and "RAY_AUTH_MODE" not in os.environ:
        # A token of this run, never written to the home folder: nobody else of the host may talk to our Ray.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    try:
        import ray
    except ImportError as error:
        raise PoolError(
            f"pool {pools[0].name} says ray: {address}, and Ray cannot be imported: {error} (fix: {_INSTALL})"
        ) from None
    try:
        if address == "local":
            _start_local(ray, pools)
        else:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    except PoolError:
        raise
    except Exception as error:  # Ray's start fails in as many ways as it has processes
        raise PoolError(f"Ray did not start ({address}): {type(error).__name__}: {str(error)[:300]}") from None
    check_offer(pools, address)


def check_offer(pools: Sequence[PoolSpec], address: str) -> None:
    """Raise PoolError where the cluster offers fewer slots of a pool than the matrix asks for."""
    import ray

    offered = ray.cluster_resources()
    for pool in pools:
        name = resource_name(pool.name)
        have = int(offered.get(name, 0))
        if have < pool.slots:
            raise PoolError(
                f"pool {pool.name} wants {pool.slots} slots, the Ray cluster at {address} offers {have} of {name} "
                f"(fix: start its nodes with --resources for {name})"
            )


def _start_local(ray: Any, pools: Sequence[PoolSpec]) -> None:
    # Its sockets need a short path, and its logs are of no use after the run.
    _folders.append(tempfile.mkdtemp(prefix="moegate-ray-"))
    ray.init(
        address="local",
        _temp_dir=_folders[-1],
        num_cpus=1,
        num_gpus=0,
        resources={resource_name(pool.name): float(pool.slots) for pool in pools},
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=80 << 20,
        _node_ip_address="127.0.0.1",
    )
