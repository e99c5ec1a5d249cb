"""Batcher, channel, weights, recorder and the completions format, each by itself."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moegate.errors import UsageError
from serving.server.__main__ import parser
from serving.server.batcher import Batcher, Request
from serving.server.channel import AsyncChannel, Channel, pack
from serving.server.completions import BadRequest, Limits, Writer, parse
from serving.server.decoder import Decoder, Prompt
from serving.server.experts import Experts
from serving.server.kvcache import KvCache
from serving.server.recorder import Recorder, snapshots_for
from serving.server.spec import read_spec
from serving.server.weights import Random, Safetensors, build
from xkernels.device import CpuDevice

CPU = torch.device("cpu")
SPEC = read_spec(Path("examples/models/tiny-moe"))


def decoder(slots: int = 2, recorder: Recorder | None = None) -> Decoder:
    cache = KvCache(SPEC.layers, slots, 64, SPEC.kv_heads * SPEC.head_dim, torch.float32, CPU)
    weights = build(SPEC, Random(1, torch.float32, CPU))
    return Decoder(SPEC, weights, cache, Experts(SPEC, torch.float32, CpuDevice(), "auto", None), recorder)


@pytest.fixture
def batcher():
    with torch.inference_mode():
        yield Batcher(decoder(), prefill_tokens=8)


def test_waiting_requests_take_slots_as_they_become_free(batcher: Batcher) -> None:
    for index, tokens in enumerate((1, 3, 2)):
        batcher.add(Request(index, [index + 2] * 3, tokens, ignore_eos=True))
    first = batcher.step()  # both slots; request 0 is done with its first token
    assert [(t.id, t.finish) for t in first] == [(0, "length"), (1, None)]
    second = batcher.step()  # request 2 is prefilled into request 0's slot before 1 goes on
    assert [t.id for t in second] == [2]
    assert {t.id for t in batcher.step()} == {1, 2}
    assert [t.id for t in batcher.step()] == [1]
    assert not batcher.busy
    assert sorted(batcher.free) == [0, 1]
    assert batcher.sizes == {6: 1, 3: 1, 2: 1, 1: 1}


def test_a_prefill_step_keeps_to_its_budget_but_runs_a_long_prompt_alone(batcher: Batcher) -> None:
    batcher.add(Request(1, [3] * 20, 1, ignore_eos=True))
    batcher.add(Request(2, [3] * 5, 1, ignore_eos=True))
    batcher.add(Request(3, [3] * 5, 1, ignore_eos=True))
    assert [len(batcher.step()) for _ in range(3)] == [1, 1, 1]


def test_cancel_frees_the_slot_and_forgets_the_waiting(batcher: Batcher) -> None:
    for index in range(3):
        batcher.add(Request(index, [5, 6], 9, ignore_eos=True))
    batcher.step()
    batcher.cancel(0)
    batcher.cancel(2)
    batcher.cancel(77)
    assert len(batcher.free) == 1
    assert {t.id for t in batcher.step()} == {1}
    batcher.cancel(1)
    assert not batcher.busy
    assert batcher.step() == []


def test_eos_ends_an_answer_unless_ignored(batcher: Batcher) -> None:
    ask = [9, 8, 7]
    batcher.add(Request(1, ask, 4, ignore_eos=True))
    token = batcher.step()[0].token
    batcher.cancel(1)
    import dataclasses

    batcher.decoder.spec = dataclasses.replace(SPEC, eos=(token,))
    batcher.add(Request(2, ask, 4))
    assert batcher.step()[0].finish == "stop"
    assert not batcher.busy


def test_logprobs_are_of_the_chosen_token_and_only_where_asked(batcher: Batcher) -> None:
    batcher.add(Request(1, [3, 4], 2, ignore_eos=True, logprobs=True))
    batcher.add(Request(2, [3, 4], 2, ignore_eos=True))
    one, two = batcher.step()
    assert two.logprob is None
    with torch.inference_mode():
        logits = decoder().prefill([Prompt([3, 4], 0)])[0]
    assert one.logprob == pytest.approx(logits.log_softmax(0).max().item(), abs=1e-5)


def test_messages_cross_the_channel_in_pieces() -> None:
    left, right = socket.socketpair()
    channel = Channel(right.detach())
    data = pack({"op": "add", "n": 1}) + pack({"op": "big", "x": "y" * 500_000})
    assert channel.receive(wait=False) == []
    left.sendall(data[:7])
    assert channel.receive(wait=False) == []

    async def talk() -> None:
        peer = await AsyncChannel.open(left)
        peer._writer.write(data[7:])
        got: list = []
        while len(got) < 2:
            got += await asyncio.to_thread(channel.receive, True)
        assert [m["op"] for m in got] == ["add", "big"]
        channel.send({"op": "info"})
        assert await peer.receive() == {"op": "info"}
        peer.close()
        with pytest.raises(EOFError):
            await asyncio.to_thread(channel.receive, True)

    asyncio.run(talk())
    channel._socket.close()


def names(weights_of: Random) -> dict[str, torch.Tensor]:
    """A checkpoint of SPEC under Hugging Face names."""

    class Noting:
        def __init__(self) -> None:
            self.tensors: dict[str, torch.Tensor] = {}

        def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            full = name if name.startswith("lm_head") else f"model.{name}"
            self.tensors[full] = weights_of.get(name, shape).contiguous()
            return self.tensors[full]

    noting = Noting()
    build(SPEC, noting)
    return noting.tensors


def test_safetensors_give_the_same_decoder(tmp_path: Path) -> None:
    tensors = names(Random(4, torch.float32, CPU))
    half = len(tensors) // 2
    shards = [dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])]
    shards[1]["model.vision.patch.weight"] = torch.zeros(3, 3)  # another part of the checkpoint
    for number, shard in enumerate(shards):
        save_file(shard, tmp_path / f"model-{number}.safetensors")
    table = {name: f"model-{number}.safetensors" for number, shard in enumerate(shards) for name in shard}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    loaded = build(SPEC, Safetensors(tmp_path, torch.float32, CPU))
    made = build(SPEC, Random(4, torch.float32, CPU))
    for ours, theirs in ((loaded.embed, made.embed), (loaded.layers[1].mlp.w1, made.layers[1].mlp.w1),
                         (loaded.layers[1].mlp.shared.down, made.layers[1].mlp.shared.down),
                         (loaded.layers[0].qkv, made.layers[0].qkv), (loaded.head, made.head)):  # fmt: skip
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("fault", ["missing", "shape", "none", "escape", "garbage"])
def test_a_wrong_checkpoint_is_refused(tmp_path: Path, fault: str) -> None:
    tensors = names(Random(4, torch.float32, CPU))
    if fault == "missing":
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    if fault == "shape":
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(128, 128)
    if fault == "garbage":
        (tmp_path / "x.safetensors").write_bytes(b"nonsense")
    elif fault == "escape":
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../x.safetensors"}}')
    elif fault != "none":
        save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(UsageError) as caught:
        build(SPEC, Safetensors(tmp_path, torch.float32, CPU))
    words = {"missing": "experts.3.up_proj", "shape": r"[128, 128]", "none": "holds no", "escape": "outside",
             "garbage": "cannot be read"}  # fmt: skip
    assert words[fault] in str(caught.value)


def test_random_weights_follow_the_seed_and_the_name_alone() -> None:
    one, same, other = (Random(seed, torch.float32, CPU) for seed in (1, 1, 2))
    a = one.get("layers.0.x", (8, 4))
    one.get("layers.0.y", (8, 4))
    assert torch.equal(a, same.get("layers.0.x", (8, 4)))
    assert not torch.equal(a, other.get("layers.0.x", (8, 4)))
    assert not torch.equal(a, one.get("layers.0.y", (8, 4)))


def test_recording_gives_a_reader_every_file_it_asks_for(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r", len(SPEC.moe_layers), min_tokens=4)
    model = decoder(recorder=recorder)
    with torch.inference_mode():
        for index in range(105):
            model.prefill([Prompt([(index * 7 + n) % 512 for n in range(2 + 4 * (index % 2))], 0)])
    found = sorted(tmp_path.glob("r/*.npy"))
    assert snapshots_for(1) == 100
    assert snapshots_for(11) == 10
    assert len(found) == 52  # every second prompt had too few rows
    # The arithmetic of a loader that walks samples over the MoE layers.
    for sample in range(50):
        array = np.load(tmp_path / "r" / f"topk_ids_layer{1 + sample % 1}_idx{sample // 1}.npy", allow_pickle=False)
        assert array.dtype == np.int32
        assert array.shape == (6, 2)
        assert 0 <= array.min() <= array.max() < 8
    with pytest.raises(UsageError, match="recordings already"):
        Recorder(tmp_path / "r", 1, 4)


LIMITS = Limits(vocab=100, length=32, model="m")
GOOD = {"prompt": [1, 2, 3], "max_tokens": 4}


@pytest.mark.parametrize(
    ("body", "field", "status"),
    [
        (b"{", None, 400), (b"[1]", None, 400), (b"\xff", None, 400), (b"[" * 100_000, None, 400),
        ({}, "prompt", 400), ({"prompt": "hello"}, "prompt", 400), ({"prompt": []}, "prompt", 400),
        ({"prompt": [[1], [2]]}, "prompt", 400), ({"prompt": ["a"]}, "prompt", 400), ({"prompt": [100]}, "prompt", 400),
        ({"prompt": [-1]}, "prompt", 400), ({"prompt": [True]}, "prompt", 400), ({"prompt": [1.5]}, "prompt", 400),
        ({"prompt": [1] * 30, "max_tokens": 3}, "prompt", 400), ({**GOOD, "max_tokens": 0}, "max_tokens", 400),
        ({**GOOD, "max_tokens": "4"}, "max_tokens", 400), ({**GOOD, "max_tokens": 99}, "max_tokens", 400),
        ({**GOOD, "temperature": 0.7}, "temperature", 400), ({**GOOD, "n": 2}, "n", 400),
        ({**GOOD, "best_of": 4}, "best_of", 400), ({**GOOD, "echo": True}, "echo", 400),
        ({**GOOD, "stop": ["x"]}, "stop", 400), ({**GOOD, "logprobs": 5}, "logprobs", 400),
        ({**GOOD, "logit_bias": {"1": 2}}, "logit_bias", 400), ({**GOOD, "stream": "yes"}, "stream", 400),
        ({**GOOD, "stream_options": 3}, "stream_options", 400), ({**GOOD, "model": "other"}, "model", 404),
        ({**GOOD, "ignore_eos": 1}, "ignore_eos", 400),
    ],
)  # fmt: skip
def test_bodies_that_cannot_be_served(body: object, field: str | None, status: int) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(BadRequest) as caught:
        parse(raw, LIMITS)
    assert (caught.value.field, caught.value.status) == (field, status)


def test_a_good_body() -> None:
    body = {**GOOD, "prompt": [[1, 2, 3]], "model": "m", "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True, "temperature": 0.0, "top_p": 1, "n": 1, "logprobs": 1, "seed": 3}  # fmt: skip
    completion = parse(json.dumps(body).encode(), LIMITS)
    assert completion.request() == {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, "logprobs": True}
    assert completion.stream
    assert completion.usage


def test_stream_and_whole_answer_say_the_same() -> None:
    completion = parse(json.dumps({**GOOD, "logprobs": 0, "stream_options": {"include_usage": True}}).encode(), LIMITS)
    batches = [[(5, None, -0.5, 10.25)], [(6, None, -0.25, 10.5), (7, "length", -1.0, 10.75)]]
    streamed, whole = Writer(3, "m", completion, 10.0), Writer(3, "m", completion, 10.0)
    events = [json.loads(streamed.chunk(batch)[6:]) for batch in batches]
    for batch in batches:
        whole.take(batch)
    answer = whole.whole()
    assert [t for e in events for t in e["choices"][0]["token_ids"]] == answer["choices"][0]["token_ids"] == [5, 6, 7]
    assert "".join(e["choices"][0]["text"] for e in events) == answer["choices"][0]["text"] == " 5 6 7"
    assert [e["choices"][0]["finish_reason"] for e in events] == [None, "length"]
    assert events[1]["choices"][0]["logprobs"]["token_logprobs"] == [-0.25, -1.0]
    usage, done = streamed.end().decode().strip().split("\n\n")
    last = json.loads(usage[6:])
    assert last["usage"] == answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert last["timing"] == answer["timing"] == {"ttft_s": 0.25, "latency_s": 0.75}
    assert done == "data: [DONE]"


def test_the_kernel_hash_of_the_experts_is_the_one_that_tuning_writes() -> None:
    from moegate.kernels import code_hash
    from serving.server.experts import kernel_hash, tuned_kernel_hash
    from tuner.engines import load_adapter
    from tuner.problem import Problem

    adapter = load_adapter("moegate", Problem("fused_experts", 8, 32, 64, 2, "float32"))
    assert tuned_kernel_hash() == adapter.kernel_hash()
    assert kernel_hash() == code_hash() != tuned_kernel_hash()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--port", "99999"), ("--port", "-1"), ("--slots", "-3"), ("--length", "9" * 5000), ("--threads", "-1"),
     ("--seed", "9" * 30), ("--max-queue", "-1"), ("--prefill-tokens", "0"), ("--record-min-tokens", "x")],
)  # fmt: skip
def test_numbers_that_no_server_can_have_are_exit_2(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parser().parse_args(["--model", "m", f"{option}={value}"])
    assert left.value.code == 2
    assert "is no number from" in capsys.readouterr().err


def test_a_last_message_outlives_what_its_sender_did_not_read() -> None:
    """A worker that fails says why though the other side was writing to it just then."""
    ours, theirs = socket.socketpair()
    worker = Channel(theirs.detach())

    def fail() -> None:
        worker.send({"op": "failed", "exit": 3, "message": "No space left on device"})
        worker.linger(30.0)
        worker._socket.close()

    async def serve() -> dict[str, object]:
        link = await AsyncChannel.open(ours)
        link.send({"op": "cancel", "id": 1})
        ending = asyncio.create_task(asyncio.to_thread(fail))
        await asyncio.sleep(0.2)  # without the linger the worker has closed by now, the cancellation unread
        said = await link.receive()
        link.close()
        await ending
        return said

    assert asyncio.run(serve())["message"] == "No space left on device"
