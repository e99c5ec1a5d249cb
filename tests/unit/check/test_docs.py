"""The reference pages say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from moegate.configs.engines import ENGINES
from moegate.devices import DEVICES
from moegate.dispatch import PLATFORM_NAMES, Capabilities, Problem, select
from moegate.families import FAMILIES
from orchestrator.check.rules import RULES

PROJECT = Path(__file__).resolve().parents[3]


def page(name: str) -> str:
    return (PROJECT / "docs" / f"{name}.md").read_text()


def test_every_rule_has_its_row_and_no_row_is_left_over() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (error|warning) \| (.*?) \| (.*?) \| (.*?) \|$", page("check"), re.MULTILINE)
    assert rows == [(r.id, r.severity, r.explanation, r.fix, r.reference) for r in RULES]


def test_every_family_engine_and_platform_is_listed() -> None:
    text = page("explain")
    for family in FAMILIES:
        assert f"| `{family.architecture}` | {' or '.join(family.experts)}" in text
    for device in DEVICES:
        for alias in device.aliases:
            assert f"| `{device.name}` | `{alias.name}` | {alias.relation} | {alias.source} |" in text
    for engine in ENGINES.values():
        assert f"| `{engine.name}` | {engine.version} |" in text
    assert " ".join(PLATFORM_NAMES) in page("dispatch")


def test_the_example_of_a_chain_is_what_the_table_answers() -> None:
    caps = Capabilities("xpu-bmg", "2.13.0", "3.8.0", packages=frozenset({"sgl_kernel"}))
    found = select("fused_experts", Problem(), caps)
    lines = [f"  {'->' if s.chosen else '  '} {s.backend}: {s.why}" for s in found.chain]
    assert "\n".join([f"fused_experts on xpu-bmg, auto: {found.resolved}", *lines, "$ "]) in page("dispatch")


@pytest.mark.parametrize("name", ["check", "explain", "dispatch"])
def test_every_option_on_the_pages_exists(name: str) -> None:
    import typer
    from typer.main import get_command

    from orchestrator.commands import check, dispatch, explain

    app = typer.Typer()
    for module in (check, explain, dispatch):
        module.register(app)
    group = get_command(app)
    commands = dict(group.commands)  # type: ignore[attr-defined]
    commands |= {f"dispatch {key}": value for key, value in commands.pop("dispatch").commands.items()}
    known = {option for command in commands.values() for p in command.params for option in p.opts}
    others = {"--fp8-gemm-backend", "--moe-runner-backend", "--effort", "--quantization"}
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page(name))) - others
    assert used <= known, used - known


def test_the_hooks_for_other_repositories() -> None:
    hooks = {hook["id"]: hook for hook in yaml.safe_load((PROJECT / ".pre-commit-hooks.yaml").read_text())}
    files = re.compile(hooks["moegate-check"]["files"])
    name = "E=64,N=896,device_name=Intel(R)_Arc(TM)_Pro_B60_Graphics_down.json"
    assert files.search(f"python/sglang/configs/triton_3_8_0/{name}")
    assert files.search("N=4096,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json")
    assert not files.search("package.json")
    sources = re.compile(hooks["moegate-dispatch"]["files"])
    assert sources.search("python/sglang/srt/layers/quantization/fp8_utils.py")
