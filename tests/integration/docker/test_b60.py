"""matrices/b60.yaml in real containers with four simulated cards: each launch sees its own card's node and no other."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.images import BuiltImage

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
CARDS = {"0000:17:00.0": 2, "0000:1b:00.0": 0, "0000:97:00.0": 3, "0000:9b:00.0": 1}
LOOK = """
import os, stat, sys
from pathlib import Path
model = Path(sys.argv[sys.argv.index("--model-path") + 1])
assert (model / "model-1.safetensors").read_bytes() == b"weights", "the weights are there"
try:
    (model / "planted").touch()
except OSError:
    pass
else:
    sys.exit("the weights can be written")
nodes = [node["node"] for node in __import__("cards").every() if Path(node["node"]).exists()]
assert len(nodes) == 1 and stat.S_ISCHR(os.stat(nodes[0]).st_mode), nodes
assert "ZE_AFFINITY_MASK" not in os.environ, "one card is visible, so a mask would hide it"
"""


@pytest.fixture
def image(cpu_image: BuiltImage, client: Any, simulated_host: Any, tmp_path: Path) -> Iterator[str]:
    """The CPU image with the stand-ins before its packages; SGLang's looks at its surroundings first."""
    if os.geteuid() != 0:
        pytest.skip("device files are made by root")
    python = simulated_host.standin(CARDS)
    for node in (simulated_host.root / "dev" / "dri").glob("*[0-9]"):
        node.unlink()
        os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # as harmless as /dev/null
        node.chmod(0o666)
    context = tmp_path / "context"
    shutil.copytree(next(python.parents[1].glob("lib/python3*/site-packages")), context / "site")
    (context / "site" / "real.pth").unlink()
    server = context / "site" / "sglang" / "launch_server.py"
    text = server.read_text()
    server.write_text(text.replace("import argparse\n", "import argparse\n" + LOOK, 1))
    (context / "Dockerfile").write_text(
        f"FROM {cpu_image.id}\nCOPY site /standin\nENV PYTHONPATH=/standin STANDIN_SCALE=8\n"
    )
    built, _ = client.images.build(path=str(context), tag="moegate-standin:test", rm=True)
    yield f"moegate-standin@{built.id}"
    client.images.remove("moegate-standin:test", force=True)


def test_the_b60_matrix_runs_in_containers(image: str, simulated_host: Any, client: Any, tmp_path: Path) -> None:
    weights, run = tmp_path / "weights", tmp_path / "run"
    weights.mkdir()
    (weights / "model-1.safetensors").write_bytes(b"weights")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (weights / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = {
        "images.sglang-xpu": f'{{reference: "{image}"}}',
        "pools.b60.ray": "none",
        "models.ocr2.weights": str(weights),
        "cells[2].load": "{requests: 2, concurrency: 2, input: 8, output: 3, seed: 42}",
        "compare.screen": "1",
        "compare.confirm": "1",
        "compare.futility": "none",
        "gate.margin": "90%",  # no cell gets there, so none is confirmed
    }
    argv = [str(simulated_host.root / "python" / "bin" / "python"), "-P", "-m", "orchestrator", "run"]
    argv += ["matrices/b60.yaml", f"--out={run}", "--isolation=docker"]
    argv += [f"--set={name}={value}" for name, value in settings.items()]
    env = {**os.environ, "MOEGATE_LOCK_DIR": str(tmp_path / "locks")}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)
    # One pair proves no gain, so the gate may say no; every cell must have run.
    assert done.returncode in (0, 1, 4), done.stdout + done.stderr
    results = {path.parts[-3]: json.loads(path.read_text()) for path in run.glob("cells/*/attempt-1/result.json")}
    kinds = sorted(name.rpartition("-")[0] for name in results)
    assert kinds == ["accuracy", "check", "serve", "serve", "serve", "serve", "tune"], done.stderr
    cards = set()
    for result in results.values():
        assert result["status"] == "ok"
        if result["kind"] != "check":
            assert result["detail"]["isolation"] == "docker"
            cards.add(result["device"]["identity"])
    assert cards == set(CARDS)
    accuracy = next(result for result in results.values() if result["kind"] == "accuracy")
    assert [launch["arm"] for launch in accuracy["launches"]] == ["untuned", "tuned"]
    assert all(len(launch["detail"]["scores"]) == 200 for launch in accuracy["launches"])
    assert not (weights / "planted").exists()
    commands = [entry["data"]["commands"] for entry in map(json.loads, (run / "journal").read_text().splitlines())
                if entry["kind"] == "done" and entry["data"]["cell"].startswith("serve")]  # fmt: skip
    for both in commands:
        for command in both:
            devices = [word for word in command if word.startswith("--device=")]
            assert len(devices) == 2, "one card: its render node and its card node"
            assert f"--volume={weights}:{weights}:ro" in command
