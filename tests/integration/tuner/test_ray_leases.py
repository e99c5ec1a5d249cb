"""Leases on a simulated node with four Intel GPUs: a stand-in `dpctl` makes a real Ray count and hand them out."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DPCTL = """
class SyclContext:
    def __init__(self, selector="level_zero:gpu"):
        self.device_count = 4

class SyclDevice:
    name = "Intel(R) Arc(TM) Pro B60 Graphics"
    def __init__(self, selector=""):
        pass
"""

DRIVER = '''
import json, os, sys
os.environ["RAY_AUTH_MODE"] = "disabled"
import ray
ray.init(num_cpus=4, include_dashboard=False, logging_level="error", log_to_driver=False)
from moegate.errors import DeviceLost
from tuner.ray.lease import run_leases
def main():
    gpus = int(ray.cluster_resources()["GPU"])
    stuck = len(sys.argv) > 1
    card = "0" if stuck else "' + (os.environ.get('ZE_AFFINITY_MASK') or os.environ['ONEAPI_DEVICE_SELECTOR']) + '"
    proof = [sys.executable, "-c", "import os, json; print(json.dumps({'identity': 'GPU-" + card + "'}))"]
    # Every lease waits until all four are there, so that all four hold their devices at the same time.
    work = [sys.executable, "-c", RECORD, "{out}", os.path.dirname(os.path.abspath(__file__))]
    try:
        outcomes = run_leases([work] * gpus, proof)
    except DeviceLost as error:
        print(json.dumps({"error": str(error)})); return
    print(json.dumps({"gpus": gpus, "masks": [o["mask"] for o in outcomes],
                      "identities": [o["identity"] for o in outcomes],
                      "seen": [o["record"]["environment"] for o in outcomes]}))
RECORD = """
import os, sys, time
from pathlib import Path
Path(sys.argv[2], f'here-{os.getpid()}').touch()
for _ in range(1200):
    if len(list(Path(sys.argv[2]).glob('here-*'))) >= 4: break
    time.sleep(0.05)
from moegate.records import DeviceIdentity, Measurement, write
names = ('ZE_AFFINITY_MASK', 'ONEAPI_DEVICE_SELECTOR', 'CUDA_VISIBLE_DEVICES')
masks = {name: os.environ[name] for name in names if name in os.environ}
record = Measurement('tune', 'ok', DeviceIdentity('xpu', 'x', 'y'), masks, {'evaluations': 1})
write(Path(sys.argv[1]) / 'result.json', record)
"""
main()
ray.shutdown()
'''


def _drive(folder: Path, *words: str) -> dict[str, object]:
    (folder / "dpctl").mkdir(exist_ok=True)
    (folder / "dpctl" / "__init__.py").write_text(DPCTL)
    script = folder / "drive.py"
    script.write_text(DRIVER)
    dropped = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env |= {"PYTHONPATH": str(folder), "RAY_DISABLE_IMPORT_WARNING": "1"}
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    document: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return document


@pytest.mark.ray
@pytest.mark.slow
def test_four_workers_get_four_devices_and_two_on_one_is_an_error(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:  # importing it here would fix its token for the whole process
        pytest.skip("ray is not installed: pip install -e '.[ray]'")
    found = _drive(tmp_path)
    assert found["gpus"] == 4
    assert len(set(found["identities"])) == 4  # type: ignore[arg-type]
    # The mask is in the environment of the process that works, and is the only one there.
    assert found["seen"] == found["masks"]
    assert all(len(mask) == 1 for mask in found["masks"])  # type: ignore[attr-defined]
    stuck = _drive(tmp_path, "stuck")
    assert "two workers run on one device" in str(stuck["error"])
