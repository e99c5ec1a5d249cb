"""The journal in front of a runner, the finals' decision, pruning, emission, routing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moegate.configs import ConfigKey, ConfigTree
from moegate.errors import InfraError, UsageError
from moegate.journal import Journal
from moegate.records import Provenance, read
from tuner.commands.emit import run as rewrite
from tuner.config import Config
from tuner.effort import EFFORTS
from tuner.emit import Origin, emit, file_entry
from tuner.finals import Final, decide
from tuner.journaled import PURPOSE, Journaled
from tuner.pipeline import _play
from tuner.problem import Problem
from tuner.prune import rejected
from tuner.routing.load import load_recording, routes_for
from tuner.routing.made import make_routes
from tuner.routing.source import source_of
from tuner.strategies.base import Choice, Findings, Outcome, Request, Unit, measure

TILE = Config.of(
    {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
)
CPU = torch.device("cpu")


class Counting:
    """A runner that answers with how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.open: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.asked += requests
        self.open += requests

    def next(self) -> Outcome:
        request = self.open.pop(0)
        return Outcome(request.unit, request.rung, (float(len(self.asked) - len(self.open)),))

    def cancel(self) -> None:
        self.open.clear()


def _request(size: int, rung: int = 0) -> Request:
    return Request(Unit(size, "up", TILE), rung, 1)


def test_nothing_is_measured_twice(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal", purpose=PURPOSE) as journal:
        first = measure(Journaled(Counting(), journal, "here"), [_request(1), _request(2), _request(1, 1)])
    with Journal.open(tmp_path / "journal", purpose=PURPOSE) as journal:
        inner = Counting()
        runner = Journaled(inner, journal, "here")
        again = measure(runner, [_request(1), _request(2), _request(4)])
        assert again[:2] == first[:2]
        assert [request.unit.batch_size for request in inner.asked] == [4]
        assert (runner.measured, runner.reused) == (1, 2)


def test_another_environment_starts_afresh(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal", purpose=PURPOSE) as journal:
        measure(Journaled(Counting(), journal, "triton 3.8"), [_request(1)])
        inner = Counting()
        measure(Journaled(inner, journal, "triton 3.9"), [_request(1)])
        assert len(inner.asked) == 1


@pytest.mark.parametrize(
    ("samples", "order"),
    [
        ([[100, 100, 100], [90, 91, 90]], [1, 0]),
        ([[100, 100, 100], [99.9, 99.9, 99.9]], [0, 1]),  # below the floor of 0.2 %
        ([[100, 130, 90, 100], [99, 100, 120, 98]], [0, 1]),  # noise
        ([[100, 200, 100], [80, 160, 80]], [1, 0]),  # a drift that both saw
        ([[100, 100], [90, 90], [80, 80]], [2, 1, 0]),
        ([[100, 100], [110, 110], [120, 120]], [0, 1, 2]),
    ],
)
def test_a_winner_must_beat_the_default_beyond_noise(samples: list[list[float]], order: list[int]) -> None:
    assert decide(samples, 0) == order


def test_one_batch_size_without_a_config_does_not_lose_the_others() -> None:
    def play(choice: Choice, default: object, rounds: int) -> Final:
        if choice.batch_size == 2:
            raise InfraError("no config computes")
        return Final(choice.batch_size, {"up": TILE, "down": TILE}, 1.0, 2.0)

    options = SimpleNamespace(problem=PROBLEM, batch_sizes=(1, 2, 4))
    setting = SimpleNamespace(options=options, default=lambda size: TILE, effort=EFFORTS["quick"])
    findings = Findings({size: Choice(size, {"up": TILE}, 1.0) for size in (1, 2)}, {})
    progress = SimpleNamespace(step=lambda text: None)
    why = {4: "crashed: ended by SIGSEGV"}.get
    played, failed = _play(SimpleNamespace(play=play), findings, setting, progress, why)  # type: ignore[arg-type]
    assert [final.batch_size for final in played] == [1]
    assert failed == {2: "no config computes", 4: "nothing runs here, mostly for crashed: ended by SIGSEGV"}
    with pytest.raises(InfraError, match="no config computes"):
        _play(SimpleNamespace(play=play), Findings({2: Choice(2, {}, 1.0)}, {}), setting, progress, why)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "error"),
    [
        ({"shared": 232449, "tmem": 0, "threads": 128, "spill_bytes": None}, "over-shared"),
        ({"shared": 1, "tmem": 513, "threads": 128, "spill_bytes": None}, "over-tensor-memory"),
        ({"shared": 1, "tmem": 0, "threads": 2048, "spill_bytes": None}, "over-threads"),
        ({"shared": 1, "tmem": 0, "threads": 128, "spill_bytes": 4700}, "spills"),
        ({"shared": 232448, "tmem": 512, "threads": 1024, "spill_bytes": 48}, None),
    ],
)
def test_pruning(facts: dict[str, int | None], error: str | None) -> None:
    verdict = rejected(facts, {"shared": 232448})
    assert (verdict[0] if verdict else None) == error


def _origin(engine: str = "moegate") -> Origin:
    return Origin(engine, "hash", "NVIDIA_H200", "GPU-1", "3.8.0", {"torch": "x"}, 3840, 100, False, "tuner tune")


def test_emitted_files_answer_the_look_up(tmp_path: Path) -> None:
    key = ConfigKey(64, 896, "NVIDIA_H200")
    finals = [
        Final(4, {"up": TILE.with_(num_stages=4), "down": TILE}, 9.0, 10.0, verified=True),
        Final(1, {"up": TILE, "down": TILE.with_(USE_TMA=True)}, 5.0, 10.0, 0.1, 0.2, verified=True, notes=("a note",)),
    ]
    files = emit(tmp_path, key, finals, _origin())
    assert [path.name for path in files[:2]] == [
        "E=64,N=896,device_name=NVIDIA_H200.json",
        "E=64,N=896,device_name=NVIDIA_H200_down.json",
    ]
    text = files[0].read_text()
    assert list(json.loads(text)) == ["1", "4"]
    assert text.endswith("}\n")
    pair = ConfigTree(tmp_path).resolve_pair(key, triton="3.8.0")
    assert pair.for_batch(1)[1]["USE_TMA"] is True
    assert pair.for_batch(4)[0]["num_stages"] == 4
    provenance = read(Provenance, files[2])
    assert provenance.timings["1"].winner_us == 5.0
    assert (provenance.covered, provenance.candidates) == (100, 3840)
    assert provenance.verified
    assert provenance.detail["notes"] == ["a note"]


def test_vllm_spelling_is_flat_and_without_what_vllm_lacks(tmp_path: Path) -> None:
    key = ConfigKey(64, 896, "NVIDIA_H200", "fp8_w8a8", (128, 128))
    finals = [Final(1, {"up": TILE.with_(USE_TMA=True), "down": TILE}, 5.0, 10.0, verified=True)]
    files = emit(tmp_path, key, finals, _origin(), "vllm")
    assert files[0].name == "E=64,N=896,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    assert "USE_TMA" not in json.loads(files[0].read_text())["1"]
    assert any("USE_TMA" in note for note in read(Provenance, files[1]).detail["notes"])
    single = TILE.with_(BLOCK_SIZE_M=1)
    one = Final(2, {"up": single, "down": single}, 5.0, 10.0, verified=True)
    files = emit(tmp_path / "two", key, [*finals, one], _origin(), "vllm")
    assert list(json.loads(files[0].read_text())) == ["1"]
    assert emit(tmp_path / "one", key, [one], _origin(), "vllm") == []
    ours = emit(tmp_path / "ours", key, [*finals, one], _origin())
    assert rewrite(target="vllm", source=tmp_path / "ours", out=tmp_path / "again", as_json=False) == 0
    assert [list(json.loads(path.read_text())) for path in (tmp_path / "again").glob("*].json")] == [["1"]]
    assert list(json.loads(ours[0].read_text())) == ["1", "2"]
    emit(tmp_path / "single", key, [one], _origin())
    with pytest.raises(UsageError, match="single: holds nothing that vllm's kernel takes"):
        rewrite(target="vllm", source=tmp_path / "single", out=tmp_path / "none", as_json=False)
    assert not (tmp_path / "none").exists()


def test_fields_that_an_engine_drops_are_stripped_and_named() -> None:
    entry, dropped = file_entry(TILE.with_(grf_mode="256", waves_per_eu=2), "sglang")
    assert "grf_mode" not in entry
    assert entry["waves_per_eu"] == 2
    assert dropped == ["grf_mode"]
    assert file_entry(TILE.with_(grf_mode="256"), "moegate")[1] == []


PROBLEM = Problem("fused_experts", 8, 64, 128, 2, "float32")


def test_made_routing_is_seeded_and_valid() -> None:
    first = make_routes(PROBLEM, 33, 3, device=CPU, seed=1)
    again = make_routes(PROBLEM, 33, 3, device=CPU, seed=1)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][1], first[1][1])
    for weights, ids in first:
        assert ids.dtype == torch.int32
        assert weights.dtype == torch.float32
        assert torch.allclose(weights.sum(-1), torch.ones(33))
        assert all(len(set(row)) == 2 for row in ids.tolist())


def test_shared_experts_take_the_last_slots() -> None:
    problem = Problem("fused_experts", 9, 64, 128, 3, "float32", shared=1)
    weights, ids = make_routes(problem, 5, 1, device=CPU, seed=0)[0]
    assert ids[:, 2].tolist() == [8] * 5
    assert weights[:, 2].tolist() == [1.0] * 5
    assert int(ids[:, :2].max()) < 8


def test_skewed_routing_is_skewed() -> None:
    even, skewed = (
        torch.bincount(make_routes(PROBLEM, 2000, 1, device=CPU, seed=0, kind=kind)[0][1].flatten().long(), minlength=8)
        for kind in ("uniform", "skewed")
    )
    assert skewed.float().std() > 2 * even.float().std()
    with pytest.raises(UsageError, match="unknown routing"):
        make_routes(PROBLEM, 1, 1, device=CPU, seed=0, kind="fair")


def _record(folder: Path, layers: Sequence[int], snapshots: int, tokens: int = 16) -> None:
    folder.mkdir(exist_ok=True)
    for layer in layers:
        for snapshot in range(snapshots):
            ids = np.full((tokens, 2), layer, dtype=np.int32) + np.array([0, snapshot], dtype=np.int32)
            np.save(folder / f"topk_ids_layer{layer}_idx{snapshot}.npy", ids)


def test_recorded_routing_walks_layers_then_snapshots_and_wraps(tmp_path: Path) -> None:
    _record(tmp_path, range(1, 4), 2)
    recording = load_recording(tmp_path)
    assert recording.layers == (1, 2, 3)
    names = [recording.file(i).stem.removeprefix("topk_ids_") for i in range(8)]
    assert names == ["layer1_idx0", "layer2_idx0", "layer3_idx0", "layer1_idx1", "layer2_idx1", "layer3_idx1",
                     "layer1_idx0", "layer2_idx0"]  # fmt: skip
    # 12 layers of which 1 is dense, two snapshots: index 99 would be snapshot 9 elsewhere; here it exists.
    assert recording.file(99).is_file()


def test_recorded_routing_of_every_format(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    _record(tmp_path, [1], 1)
    ids = np.full((4, 2), 5, dtype=np.int64)
    save_file({"topk_ids": ids}, tmp_path / "topk_ids_layer2_idx0.safetensors")
    torch.save(torch.full((4, 2), 6), tmp_path / "topk_ids_layer3_idx0.pt")
    routes = routes_for(PROBLEM, 10, 3, device=CPU, seed=0, source=str(tmp_path))
    assert [int(ids[9, 0]) for _, ids in routes] == [1, 5, 6]
    assert all(ids.shape == (10, 2) and ids.dtype == torch.int32 for _, ids in routes)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: np.save(p, np.zeros((4, 2))), "not integer"),
        (lambda p: np.save(p, np.zeros((4, 1), np.int32)), "fewer than 2"),
        (lambda p: np.save(p, np.full((4, 2), 8)), "expert 8 of 8"),
        (lambda p: np.save(p, np.full((4, 2), 2**32 + 3)), "expert 4294967299 of 8"),
        (lambda p: np.save(p, np.full((4, 2), 2**64 - 1, np.uint64)), "expert 18446744073709551615 of 8"),
        (lambda p: np.save(p, np.array([[-2, 3]])), "expert -2 of 8"),
        (lambda p: p.write_bytes(b"\x93NUMPY garbage"), "cannot be read"),
        (lambda p: np.save(p, np.array([{"a": 1}], dtype=object), allow_pickle=True), "cannot be read"),
    ],
)
def test_damaged_recordings_are_refused(tmp_path: Path, make: object, words: str) -> None:
    make(tmp_path / "topk_ids_layer0_idx0.npy")  # type: ignore[operator]
    with pytest.raises(UsageError, match=words):
        routes_for(PROBLEM, 4, 1, device=CPU, seed=0, source=str(tmp_path))


def test_recorded_shared_experts_run_on_every_rank(tmp_path: Path) -> None:
    # Two ranks of 4 routed experts; the engine that recorded counts its shared expert after all 8.
    recorded = np.array([[0, 3, 8], [4, 7, 8], [2, 6, 8], [-1, -1, -1]])
    np.save(tmp_path / "topk_ids_layer0_idx0.npy", recorded)
    problem = Problem("fused_experts", 5, 64, 128, 3, "float32", shared=1, ep=2)
    weights, ids = routes_for(problem, 4, 1, device=CPU, seed=0, source=str(tmp_path))[0]
    assert ids.dtype == torch.int32
    assert ids.tolist() == [[0, 3, 4], [-1, -1, 4], [2, -1, 4], [-1, -1, -1]]
    assert weights[:, 2].tolist() == [1.0] * 4
    alone = Problem("fused_experts", 9, 64, 128, 3, "float32", shared=1)
    assert routes_for(alone, 4, 1, device=CPU, seed=0, source=str(tmp_path))[0][1].tolist() == recorded.tolist()


def test_a_recording_without_shared_experts_does_not_pass_for_one_with(tmp_path: Path) -> None:
    np.save(tmp_path / "topk_ids_layer0_idx0.npy", np.array([[0, 3, 5], [4, 7, 1]]))
    problem = Problem("fused_experts", 5, 64, 128, 3, "float32", shared=1, ep=2)
    with pytest.raises(UsageError, match="names no shared expert, which are those from 8"):
        routes_for(problem, 2, 1, device=CPU, seed=0, source=str(tmp_path))


@pytest.mark.parametrize("other", ["topk_ids_layer1_idx0.pt", "topk_ids_layer01_idx0.npy"])
def test_two_files_of_one_layer_and_snapshot_are_refused(tmp_path: Path, other: str) -> None:
    _record(tmp_path, [1], 1)
    torch.save(torch.full((4, 2), 6), tmp_path / other)
    with pytest.raises(UsageError, match="layer 1, snapshot 0") as caught:
        source_of(str(tmp_path))
    assert "topk_ids_layer1_idx0.npy" in str(caught.value)
    assert other in str(caught.value)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (Path(tmp_path / "owned"),))  # type: ignore[return-value]

    torch.save({"x": torch.zeros(1)}, tmp_path / "ok.pt")
    (tmp_path / "topk_ids_layer0_idx0.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UsageError, match="cannot be read"):
        routes_for(PROBLEM, 4, 1, device=CPU, seed=0, source=str(tmp_path))
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("make", "words"), [(os.mkfifo, "is no regular"), (Path.mkdir, "is no regular"), (Path.touch, "is empty")]
)
def test_recordings_that_hold_nothing_are_refused_before_anything_starts(
    tmp_path: Path, make: Callable[[Path], None], words: str
) -> None:
    _record(tmp_path, [1], 1)
    make(tmp_path / "topk_ids_layer2_idx0.npy")
    with pytest.raises(UsageError, match=rf"topk_ids_layer2_idx0\.npy: {words}"):
        source_of(str(tmp_path))


def test_a_folder_without_recordings_says_what_it_wants(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="topk_ids_layer"):
        load_recording(tmp_path)
