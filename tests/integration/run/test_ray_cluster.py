"""An existing Ray cluster of two nodes: leases are placed on this host's own, and a host that is none is refused."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from moegate.errors import PoolError
from moegate.records import PoolSpec

DRIVER = """
import json, os
os.environ["RAY_AUTH_MODE"] = "disabled"
from ray.cluster_utils import Cluster
offer = {"num_cpus": 1, "num_gpus": 4, "resources": {"moegate_b60": 4}, "object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args={**offer, "include_dashboard": False})
cluster.add_node(**offer)
from moegate.errors import PoolError
from moegate.records import PoolSpec
from orchestrator.pools import ray as pool
import pathlib, ray
from ray.util.placement_group import placement_group_table
import time

spec = PoolSpec("b60", "xpu", slots=4, ray=cluster.address)
pool.start([spec], pathlib.Path("/nowhere"))
mine, theirs = pool.RayAllocator(spec), pool.RayAllocator(spec)
take = lambda who, slot: any(who.take(slot) or time.sleep(0.1) for _ in range(300))
took = [take(mine, slot) for slot in range(4)]
own = ray.get_runtime_context().get_node_id()
nodes = [set(placement_group_table(group)["bundles_to_node_id"].values()) for group in mine._held.values()]
fifth = [theirs.take(4) for _ in range(3)]
def left():
    free = ray._private.state.available_resources_per_node()
    return {node["NodeID"] == own: free[node["NodeID"]].get("GPU", 0) for node in ray.nodes()}
for _ in range(300):  # a node reports what it gave away a moment later
    seen = left()
    if seen == {True: 0, False: 4}: break
    time.sleep(0.1)
try:
    pool.check_offer([PoolSpec("b60", "xpu", slots=5, ray=cluster.address)], cluster.address)
    refused = ""
except PoolError as error:
    refused = str(error)
mine.close()
again = take(theirs, 4)
print(json.dumps({"took": took, "placed": all(found == {own} for found in nodes), "fifth": fifth, "again": again,
                  "here": seen[True], "there": seen[False], "refused": refused}))
pool.stop()
cluster.shutdown()
"""


@pytest.mark.ray
@pytest.mark.slow
def test_leases_are_placed_on_this_hosts_node(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install -e '.[ray]'")
    (tmp_path / "drive.py").write_text(DRIVER)
    argv = [sys.executable, "-P", str(tmp_path / "drive.py")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["took"] == [True] * 4
    assert found["placed"], "a unit of another node's is no lease of a device here"
    assert found["fifth"] == [False] * 3, "the other node's four free units do not count"
    assert (found["here"], found["there"]) == (0, 4), "Ray's own GPU tasks cannot be placed on a leased device"
    assert found["again"]
    assert "offers 4 of moegate_b60" in found["refused"]


def test_a_ray_client_address_is_refused_with_what_to_do() -> None:
    from orchestrator.pools import ray

    with pytest.raises(PoolError, match="run the orchestrator on the node with the devices"):
        ray.start([PoolSpec("b60", "xpu", ray="ray://head:10001")], Path("/nowhere"))
