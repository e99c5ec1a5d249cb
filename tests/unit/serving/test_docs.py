"""docs/serving.md names what there is: options, fields, endpoints, engines and modules."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import typer

from serving import engines
from serving.cli import app
from serving.load.bench import Limits
from serving.load.metrics import METRICS
from serving.server.app import build

TEXT = Path("docs/serving.md").read_text()


def options() -> dict[str, set[str]]:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {name: {o for p in command.params for o in p.opts} for name, command in commands.items()}


def test_every_option_in_an_example_exists() -> None:
    known = options()
    for name, rest in re.findall(r"serving (launch|bench|accuracy)((?: [^\n`$#]+|\\\n)+)", TEXT):
        for option in re.findall(r"--[a-z-]+", rest.split(" -- ")[0]):
            assert option in known[name], f"serving {name} has no {option}"


def test_every_option_with_a_rule_of_its_own_is_described() -> None:
    for option in ("--concurrency", "--rate", "--seed", "--output", "--events", "--announce", "--launch", "--configs",
                   "--graph", "--record-routing"):  # fmt: skip
        assert option in TEXT


def test_every_engine_endpoint_and_module_is_named() -> None:
    assert all(f"`{name}`" in TEXT for name in engines.ENGINES)
    paths = {route.path for route in build(None, "m", 1).routes}  # type: ignore[arg-type]
    assert all(path in TEXT for path in paths)
    for module in set(re.findall(r"python -m (serving[a-z.]+)", TEXT)) | {"serving.load.importers"}:
        assert importlib.util.find_spec(module), module


def test_limits_are_those_of_the_code() -> None:
    limits = Limits()
    assert f"{limits.lag_ms:g} ms" in TEXT
    assert limits.lag_share == 0.25
    assert "a quarter of the median TPOT" in TEXT
    assert f"{limits.cpu_share:.0%}".replace("%", " %") in TEXT
    assert {"median_ttft_ms", "p99_itl_ms", "output_throughput"} <= {metric.name for metric in METRICS}


def test_the_diff_shows_the_table_as_it_is() -> None:
    removed = re.findall(r"^-(ENGINES.*)$", TEXT, re.MULTILINE)
    assert removed
    assert removed[0] in Path("serving/engines/__init__.py").read_text()
