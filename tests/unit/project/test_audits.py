"""What bandit finds in our Python is nothing, or has its reason here; and what no code of ours may do is not there."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TREES = ("moegate", "orchestrator", "reports", "tuner", "serving", "kernels/xkernels", "infra", "scripts")

# (rule, file): how many, and why each is right.
WAIVED = {
    ("B103", "moegate/locks.py"): (1, "the folder of host-wide locks is every user's, and sticky as /tmp is"),
    ("B105", "serving/engines/foreign.py"): (4, "tokens of a vocabulary"),
    ("B105", "serving/load/accuracy.py"): (1, "`return_token_ids` of a request"),
    ("B105", "serving/load/importers.py"): (1, "a metric, `total_token_throughput`"),
    ("B108", "orchestrator/pools/isolation/docker.py"): (2, "/tmp inside a container, a tmpfs of its own"),
    ("B108", "orchestrator/pools/ray_apart.py"): (
        1,
        "the parent of a folder that mkdtemp makes, where a socket needs a short path",
    ),
    ("B311", "moegate/stats/schedule.py"): (1, "the order of pairs: seeded, not secret"),
    ("B311", "serving/load/soak.py"): (1, "load: seeded, not secret"),
    ("B311", "serving/load/workload.py"): (2, "prompts: seeded, not secret"),
    ("B311", "tuner/noisy.py"): (1, "planted noise: seeded, not secret"),
    ("B311", "tuner/strategies/racing.py"): (1, "candidates: seeded, not secret"),
    ("B311", "tuner/strategies/random_sample.py"): (1, "candidates: seeded, not secret"),
    ("B405", "reports/junit.py"): (1, "XML is written, none is read"),
    ("B608", "orchestrator/history.py"): (3, "names of tables and columns are literals, values are bound"),
    ("B704", "reports/html.py"): (2, "escaped before, and our own style sheet"),
    ("B704", "reports/svg/core.py"): (1, "escaped before"),
}

# Calls that run what they read, or a shell; and calls that are right only with a certain argument.
FORBIDDEN = {
    "eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads",
    "shelve.open", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "joblib.load", "pandas.read_pickle",
    "torch.hub.load", "shutil.unpack_archive", "subprocess.getoutput", "dill.loads", "cloudpickle.loads",
}  # fmt: skip
ONLY_WITH = {
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
    "torch.load": ("weights_only", True),
}


def test_bandit_finds_nothing_without_a_reason() -> None:
    program = Path(sys.executable).with_name("bandit")
    argv = [program, "--quiet", "--recursive", "--format=json", "--configfile=pyproject.toml", *TREES]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    document = json.loads(done.stdout)
    assert not document["errors"]
    rows = [(row["test_id"], row["filename"].removeprefix("./")) for row in document["results"]]
    assert Counter(rows) == {key: count for key, (count, _) in WAIVED.items()}
    assert len(document["metrics"]) > 150


def sources() -> list[Path]:
    return sorted(path for tree in TREES for path in (ROOT / tree).rglob("*.py"))


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_data_is_run(path: Path) -> None:
    """No pickle, no shell, no evaluation: data stays data."""
    for name, node in calls(path):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert name not in FORBIDDEN, f"line {node.lineno}: {name}"
        assert given.get("shell") in (None, "False"), f"line {node.lineno}: a shell"
        assert given.get("trust_remote_code") in (None, "False"), f"line {node.lineno}: code of a model"
        if name in ONLY_WITH:
            argument, value = ONLY_WITH[name]
            assert given.get(argument) == str(value), f"line {node.lineno}: {name} without {argument}={value}"
        if name.endswith(".extractall"):
            assert given.get("filter") == "'data'", f"line {node.lineno}: an archive unpacked as it likes"
