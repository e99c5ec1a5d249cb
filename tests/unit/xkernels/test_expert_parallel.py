"""Expert parallelism over four gloo ranks: right results, the same bits everywhere, and no hang."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from xkernels.device import CpuDevice, Limits
from xkernels.ops import expert_parallel as ep
from xkernels.ops._details import grid

pytestmark = pytest.mark.slow
WORLD = 4
WORKER = Path(__file__).with_name("ep_worker.py")
Results = list[dict[str, np.ndarray]]


def run_group(scenario: str, folder: Path, expect: tuple[int, ...] = (0,) * WORLD) -> Results:
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(WORLD):
        with (folder / f"{rank}.err").open("w") as log:
            command = [sys.executable, str(WORKER), scenario, str(rank), str(WORLD), str(folder)]
            ranks.append(subprocess.Popen(command, env=env, stderr=log))
    codes = tuple(process.wait(timeout=250) for process in ranks)
    assert codes == expect, "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.err")))
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(WORLD) if expect[rank] == 0]


@pytest.fixture(scope="module")
def bits(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_group("bits", tmp_path_factory.mktemp("bits"))


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_group("shapes", tmp_path_factory.mktemp("shapes"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tokens_bits_depend_on_neither_batch_nor_rank(bits: Results, dtype: str) -> None:
    alone = bits[0][f"{dtype}-alone"]
    for count in (1, 7, 64):
        together = np.concatenate([rank[f"{dtype}-{count}"] for rank in bits])
        np.testing.assert_array_equal(together, alone[:count])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_travelling_in_parts_changes_no_bit(bits: Results, dtype: str) -> None:
    together = np.concatenate([rank[f"{dtype}-halves"] for rank in bits])
    np.testing.assert_array_equal(together, bits[0][f"{dtype}-alone"])


def test_parts_are_under_way_together(shapes: Results) -> None:
    """All rows have departed before the first outputs do, so the experts work while rows move."""
    for rank in shapes:
        steps = list(rank["thirds-steps"])
        assert [steps.count(step) for step in ("counts", "tokens", "outputs")] == [3, 3, 3]
        assert max(at for at, step in enumerate(steps) if step == "tokens") < steps.index("outputs")
    got = np.concatenate([rank["thirds"] for rank in shapes])
    np.testing.assert_allclose(got, shapes[0]["want-thirds"], atol=1e-4)


def test_every_order_of_the_ranks_gives_the_same_bits(bits: Results) -> None:
    orders = [name for name in bits[0] if name.startswith("float32-order-")]
    assert len(orders) == 24
    for name in orders:
        holder = [name.rsplit("-", 1)[1].index(str(share)) for share in range(WORLD)]
        together = np.concatenate([bits[rank][name] for rank in holder])
        np.testing.assert_array_equal(together, bits[0]["float32-alone"][:7])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_both_modes_agree_with_the_reference(bits: Results, dtype: str, tolerance: float) -> None:
    want = bits[0][f"{dtype}-reference"]
    fast = np.concatenate([rank[f"{dtype}-fast"] for rank in bits])
    for got in (fast, bits[0][f"{dtype}-alone"]):
        assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("mode", ["fast", "deterministic"])
@pytest.mark.parametrize("case", ["one-rank-holds-all", "all-to-one", "filtered"])
def test_uneven_loads(shapes: Results, mode: str, case: str) -> None:
    got = np.concatenate([rank[f"{mode}-{case}"] for rank in shapes])
    np.testing.assert_allclose(got, shapes[0][f"want-{case}"], atol=1e-4)


def test_no_tokens_anywhere(shapes: Results) -> None:
    assert all(rank[f"{mode}-nobody"].shape == (0, 128) for rank in shapes for mode in ("fast", "deterministic"))


def test_the_wires_dtype_follows_the_checkpoint(shapes: Results) -> None:
    for rank in shapes:
        assert list(rank["trace-None"]) == [
            "counts:int32:16", "tokens:bfloat16:256", "expert ids:int32:8", "router weights:float32:8",
            "outputs:bfloat16:256",
        ]  # fmt: skip
        assert list(rank["trace-fp8_w8a8"]) == [
            "counts:int32:16", "tokens:float8_e4m3fn:128", "scales:float32:4", "expert ids:int32:8",
            "router weights:float32:8", "outputs:bfloat16:256",
        ]  # fmt: skip
        assert rank["rows-None"] == rank["rows-fp8_w8a8"]
    exact = np.concatenate([rank["wire-None"] for rank in shapes])
    narrow = np.concatenate([rank["wire-fp8_w8a8"] for rank in shapes])
    error = np.abs(exact - narrow).max() / np.abs(exact).max()
    assert 0 < error < 0.1


def test_over_capacity_every_rank_refuses_alike_and_the_group_lives(tmp_path: Path) -> None:
    ranks = run_group("refusals", tmp_path)
    assert {str(rank["said"]) for rank in ranks} == {"rank 0 would receive 8 rows; its capacity is 3"}
    assert sum(rank["after"].shape[0] for rank in ranks) == 8


def test_a_killed_rank_is_a_clear_error_on_every_other(tmp_path: Path) -> None:
    ranks = run_group("killed", tmp_path, expect=(0, 0, 0, 9))
    for rank in ranks:
        assert "exchange of" in str(rank["said"])
        assert float(rank["seconds"]) < 60, "long before the group's own timeout"


class Simulated(CpuDevice):
    """A device with a given number of units."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units

    def limits(self) -> Limits:
        return Limits(0, 0, self.units, self.units * 16)


@pytest.mark.parametrize("units", [8, 20, 96, 132, 304])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_a_synchronising_grid_never_exceeds_what_is_resident(
    units: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Through the code that launches, for every dtype that travels: skipping the clamp in one of them fails here."""
    started: list[tuple[int, int]] = []

    class Recorder:
        def __getitem__(self, launch_grid: tuple[int]):  # type: ignore[no-untyped-def]
            return lambda *_, PROGRAMS, **__: started.append((launch_grid[0], PROGRAMS))

    monkeypatch.setattr(ep._k, "route", Recorder())
    monkeypatch.setattr(ep.devices, "of", lambda _: Simulated(units))
    monkeypatch.setattr(grid, "GRIDS", {})
    layout = ep.EpLayout(None, 0, 4, 8, 128, 2, "fast", "triton", ep.Wire(dtype), dtype, None, *[torch.zeros(8)] * 2)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        for entries in (1, 100, 300_000):
            ep._route(torch.zeros(entries, dtype=torch.int32), layout)
    wanted = [1, 1, 1172]
    assert started == [(min(want, units),) * 2 for want in wanted]
    assert len([record for record in caplog.records if "ep_route" in record.message]) == 1
    assert next(iter(grid.GRIDS.values())).resident == units


def test_only_this_module_starts_the_kernel_that_waits_for_its_grid() -> None:
    root = Path(ep.__file__).parent
    users = [path.name for path in root.rglob("*.py") if ".route[" in path.read_text()]
    assert users == ["expert_parallel.py"]
    text = Path(ep.__file__).read_text()
    assert text.count(".route[") == text.count('synchronising_grid(cdiv(numel, _CHUNK), "ep_route"') == 1


@pytest.fixture
def pair(tmp_path: Path):  # type: ignore[no-untyped-def]
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "deterministic", "backend": "torch"}, "needs backend triton"),
        ({"quant": "fp8_w8a8", "hidden": 100}, "divisible by 128"),
        ({"topk": 9}, "does not fit"),
        ({"capacity": 0}, "at least 1"),
        ({"parts": 0}, "at least 1 part"),
        ({"mode": "quick"}, "fast or deterministic"),
    ],
)
def test_what_cannot_work_is_refused_when_the_layer_is_built(pair, change: dict[str, object], message: str) -> None:  # type: ignore[no-untyped-def]
    options: dict[str, object] = {"num_experts": 8, "hidden": 128, "topk": 2, "mode": "fast", "backend": "triton"}
    with pytest.raises(ep.EpUnsupported, match=message):
        ep.ep_layout(pair, **(options | change))  # type: ignore[arg-type]
