"""Ray as an allocator: a placement group per slot, and nothing else. No task and no actor of ours runs on it.

This is what `orchestrator.pools.ray_apart` runs in a process of its own; the orchestrator itself never loads Ray.

Ray retries, reuses workers and swallows exit signals, so it is asked one question only: may this slot be used now? A
placement group answers that, across all drivers of a cluster, without starting a worker process. Launches are fresh
processes or containers of this host either way: on an existing cluster the groups are placed on this host's own node,
with its GPU where the node counts any, so that Ray's work of others and ours exclude each other. A host that is no node
of the cluster is refused, and so is a Ray Client address, whose driver sits on the cluster's head and not here.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moegate.errors import PoolError
from moegate.extras import install
from moegate.records import PoolSpec

__all__ = ["RayAllocator", "check_offer", "resource_name", "start", "stop"]

_INSTALL = f"{install('ray')}, or write `ray: none` in the pool"
_WAIT_S = 1  # Ray reads whole seconds
_LOOK_S = 5.0
_mutex = threading.Lock()


def resource_name(pool: str) -> str:
    """The custom resource that counts a pool's slots; a cluster's nodes offer it under the same name."""
    return f"moegate_{pool}"


class RayAllocator:
    """The slots of one pool as placement groups."""

    def __init__(self, spec: PoolSpec) -> None:
        self._bundle = {resource_name(spec.name): 1.0}
        self._place: dict[str, Any] = {}
        if spec.ray != "local":
            node = _own_node()
            self._place = {"bundle_label_selector": [{"ray.io/node-id": node["NodeID"]}]}
            if spec.device != "cpu" and node["Resources"].get("GPU", 0) >= 1:
                self._bundle["GPU"] = 1.0
        self._held: dict[int, Any] = {}
        self._asked: dict[int, Any] = {}
        self._looked = time.monotonic()

    def take(self, slot: int) -> bool:
        """Reserve one unit of the pool's resource; False while the cluster has none free.

        A request stays in Ray's queue between calls, so that whoever asked first is served first.

        Raises:
            PoolError: this host's node has died, so the request would wait for ever.
        """
        from ray.util.placement_group import placement_group, placement_group_table

        with _mutex:
            group = self._asked.pop(slot, None)
            if group is None:
                group = placement_group([self._bundle], strategy="STRICT_PACK", **self._place)
                ready = bool(group.wait(timeout_seconds=_WAIT_S))
            else:
                ready = placement_group_table(group)["state"] == "CREATED"
            (self._held if ready else self._asked)[slot] = group
        if not ready and time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            _own_node()
        return ready

    def give(self, slot: int) -> None:
        """Remove the slot's placement group."""
        self._remove(slot)

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


def start(pools: Sequence[PoolSpec], folder: Path) -> None:
    """Start a local Ray for these pools, or connect to the cluster that they name.

    folder: where a local one keeps its logs and sockets; a short path, because a socket's is limited.

    Raises:
        PoolError: Ray is not installed, does not start, or does not offer the pool's slots.
    """
    address = pools[0].ray
    if address.startswith("ray://"):
        raise PoolError(
            f"pool {pools[0].name} says ray: {address}, a Ray Client address: launches run where the orchestrator "
            "runs, and that would be no node of the cluster (fix: run the orchestrator on the node with the devices, "
            "and write the cluster's own address, such as HEAD:6379)"
        )
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
            _start_local(ray, pools, folder)
        else:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    except PoolError:
        raise
    except Exception as error:  # Ray's start fails in as many ways as it has processes
        raise PoolError(f"Ray did not start ({address}): {type(error).__name__}: {str(error)[:300]}") from None
    check_offer(pools, address)


def check_offer(pools: Sequence[PoolSpec], address: str) -> None:
    """Raise PoolError where this host's node offers fewer slots of a pool than the matrix asks for."""
    import ray

    offered = ray.cluster_resources() if address == "local" else _own_node()["Resources"]
    where = "the Ray" if address == "local" else "this host's node of the Ray cluster"
    for pool in pools:
        name = resource_name(pool.name)
        have = int(offered.get(name, 0))
        if have < pool.slots:
            raise PoolError(
                f"pool {pool.name} wants {pool.slots} slots, {where} at {address} offers {have} of {name} "
                f"(fix: start the node with --resources for {name})"
            )


def _own_node() -> dict[str, Any]:
    """This host's node as the cluster describes it. Raises PoolError where the driver is on no living node."""
    import ray

    ident = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == ident and node["Alive"]:
            return dict(node)
    raise PoolError("this host is no living node of the Ray cluster (fix: `ray start --address=...` here first)")


def _start_local(ray: Any, pools: Sequence[PoolSpec], folder: Path) -> None:
    ray.init(
        address="local",
        _temp_dir=str(folder),
        num_cpus=1,
        num_gpus=0,
        resources={resource_name(pool.name): float(pool.slots) for pool in pools},
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=80 << 20,
        _node_ip_address="127.0.0.1",
    )
