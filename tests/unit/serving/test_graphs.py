"""The contract of graph replays: padding changes nothing, every input is fresh, and a missing one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serving.server.batcher import Batcher, Request
from serving.server.decoder import Decoder, Prompt
from serving.server.experts import Experts
from serving.server.graphs import GraphedDecode, Inputs, StaleInput, padded_sizes
from serving.server.kvcache import KvCache
from serving.server.spec import read_spec
from serving.server.weights import Random, build
from xkernels.device import CpuDevice

CPU = torch.device("cpu")


class Replayed(CpuDevice):
    """A CPU whose 'graphs' re-run the captured work over the same static tensors, as a device graph does.

    Output tensors keep their address, and a replay runs no Python of the model: it counts no call.
    """

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts, self.replays = experts, 0

    def capture(self, work, warmups: int = 1):  # type: ignore[no-untyped-def]
        device, cells = self, work.__closure__
        held = next(c.cell_contents for c in cells if isinstance(c.cell_contents, list))
        work()
        static = held[0]

        class Graph:
            def replay(self) -> None:
                device.replays += 1
                before = device.experts.rows.copy()
                work()
                device.experts.rows = before
                static.copy_(held[0])
                held[0] = static

        return Graph()


def decoder(slots: int = 6) -> Decoder:
    spec = read_spec(Path("examples/models/tiny-moe"))
    cache = KvCache(spec.layers, slots, 320, spec.kv_heads * spec.head_dim, torch.float32, CPU)
    experts = Experts(spec, torch.float32, CpuDevice(), "torch", None)
    return Decoder(spec, build(spec, Random(1, torch.float32, CPU)), cache, experts)


def test_padded_sizes_cover_every_batch() -> None:
    assert padded_sizes(1) == (1,)
    assert padded_sizes(6) == (1, 2, 4, 6)
    assert padded_sizes(128)[-3:] == (96, 112, 128)
    for slots in range(1, 200):
        assert padded_sizes(slots)[-1] == slots


@pytest.mark.parametrize("graphs", [False, True])
def test_fewer_rows_than_the_graph_has_slots(graphs: bool) -> None:
    with torch.inference_mode():
        eager, graphed = decoder(), decoder()
        live = Replayed(graphed.experts) if graphs else CpuDevice()
        step = GraphedDecode(graphed, live)
        for model in (eager, graphed):
            model.prefill([Prompt([4, 5, 6], 5), Prompt([9, 9], 0), Prompt([1], 3)])
        # Three rows run in a graph of four. The eager step is padded alike: same kernels on the same shapes.
        padded = torch.tensor([[7, 8, 9, 0], [3, 2, 1, -1], [5, 0, 3, 0]])
        want = eager.decode(padded[0], padded[1], padded[2], step.span([3]))[:3]
        got = step([7, 8, 9], [3, 2, 1], [5, 0, 3])
        assert torch.equal(got, want), "bit for bit"
        assert torch.equal(eager.cache.keys[:, 1:], graphed.cache.keys[:, 1:]), "padding wrote to no sequence's row"
        # And the next step, with another batch in the same graph.
        padded = torch.tensor([[11, 12, 0, 0], [3, 4, -1, -1], [0, 5, 0, 0]])
        again = GraphedDecode.__call__(step, [11, 12, 13], [3, 4, 2], [0, 5, 3])
        alone = eager.decode(
            torch.tensor([11, 12, 13, 0]), torch.tensor([3, 4, 2, -1]), torch.tensor([0, 5, 3, 0]), 256
        )
        assert torch.equal(again, alone[:3])
        if isinstance(live, Replayed):
            assert live.replays == 2


def test_stale_contents_cannot_leak_into_a_smaller_batch() -> None:
    inputs = Inputs(4, CPU)
    inputs.fill([1, 2, 3, 4], [10, 11, 12, 13], [0, 1, 2, 3])
    inputs.take()
    inputs.fill([9], [5], [2])
    assert inputs.take().tolist() == [[9, 0, 0, 0], [5, -1, -1, -1], [2, 0, 0, 0]]


@pytest.mark.parametrize(
    ("tokens", "positions", "slots"),
    [([1, 2], [3], [0, 1]), ([1, 2], [3, 4], [0]), ([1], [3, 4], [0, 1]), ([], [], []), ([1] * 5, [1] * 5, [0] * 5),
     ([1, 2], [3, -1], [0, 1])],
)  # fmt: skip
def test_a_missing_input_is_refused(tokens: list, positions: list, slots: list) -> None:
    inputs = Inputs(4, CPU)
    with pytest.raises(StaleInput):
        inputs.fill(tokens, positions, slots)
    with pytest.raises(StaleInput, match="not refreshed"):
        inputs.take()


def test_a_replay_needs_fresh_inputs() -> None:
    inputs = Inputs(2, CPU)
    inputs.fill([1], [0], [0])
    inputs.take()
    with pytest.raises(StaleInput, match="not refreshed"):
        inputs.take()


def run(model: Decoder, decode: object) -> tuple[dict[int, list[int]], Batcher]:
    batcher = Batcher(model, 64, decode)
    answers: dict[int, list[int]] = {}
    with torch.inference_mode():
        for index in range(9):
            batcher.add(Request(index, [index + 2, 40 + index], 5 + index % 4, ignore_eos=True))
        while batcher.busy:
            for token in batcher.step():
                answers.setdefault(token.id, []).append(token.token)
    return answers, batcher


def test_whole_answers_are_the_same_with_and_without_graphs() -> None:
    model = decoder()
    live = Replayed(model.experts)
    plain, _ = run(decoder(), None)
    graphed, batcher = run(model, GraphedDecode(model, live))
    assert plain == graphed
    assert live.replays > 0
    assert len(batcher.free) == 6


def test_calls_are_counted_per_replay_and_not_per_capture() -> None:
    model = decoder()
    step = GraphedDecode(model, Replayed(model.experts))
    with torch.inference_mode():
        model.prefill([Prompt([4, 5, 6], 0)])
        model.experts.rows.clear()
        for position in (3, 4, 5):
            step([7], [position], [0])
    assert model.experts.rows == {1: 3}


def test_two_works_fork_and_join_around_the_current_stream() -> None:
    """`beside` on a simulated accelerator: the side stream starts after the current one and is joined at the end."""
    from contextlib import contextmanager

    from xkernels.device._accelerator import Accelerator

    log: list[str] = []

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = "main" if name == "main" else "side"

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

    class Module:
        now = Stream("main")

        def current_stream(self, index: int) -> Stream:
            return self.now

        @contextmanager
        def stream(self, stream: Stream):  # type: ignore[no-untyped-def]
            before, Module.now = self.now, stream
            yield
            Module.now = before

    Module.Stream = Stream  # type: ignore[attr-defined]
    module = Module()
    got = Accelerator(0, module).beside(
        lambda: log.append(f"first on {module.now.name}") or 1, lambda: log.append(f"second on {module.now.name}") or 2
    )
    assert got == (1, 2)
    assert log == ["side waits for main", "first on side", "second on main", "main waits for side"]
    assert CpuDevice().beside(lambda: 3, lambda: 4) == (3, 4)
