"""The commands `serving launch`, `bench` and `accuracy`. Each imports what it needs when it runs, to start fast."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moegate.entry import ready_to_write
from moegate.errors import InfraError, UsageError
from moegate.exits import Exit
from moegate.paths import is_file, is_folder

if TYPE_CHECKING:
    from serving.load.bench import Model

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]},
                  help="Serve a model, put a load on it, compare its answers.")  # fmt: skip

# Two spellings of a dtype that people type; engines get the long one.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "None": "auto"}


def _to_write(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """As `ready_to_write`, for an option that may be left out."""
    return None if value is None else ready_to_write(value, param.opts[0])


Out = Annotated[Path, typer.Option(help="the Measurement (JSON), written whole or not at all", callback=_to_write)]
BaseUrl = Annotated[str | None, typer.Option(help="the server (default: $MOEGATE_BASE_URL)")]
Announced = Annotated[
    Path | None, typer.Option("--launch", help="the server that a `serving launch --announce` told of")
]


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    model: Annotated[Path, typer.Option(help="folder with a Hugging Face config.json, or that file")],
    engine: Annotated[str, typer.Option(help="moegate, sglang or vllm")] = "moegate",
    weights: Annotated[str, typer.Option(help="`random` (seeded), or a checkpoint folder")] = "random",
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16")] = "auto",
    moe_runner_backend: Annotated[str, typer.Option(help="auto, triton, torch, ..: backend of the experts")] = "auto",
    graph: Annotated[str, typer.Option(help="eager, or full: decode in device graphs")] = "eager",
    configs: Annotated[str | None, typer.Option(help="folder of tuned configs, or `none` (default: what we ship, or "
                                                     "$MOEGATE_CONFIG_DIR)")] = None,
    port: Annotated[int, typer.Option(help="0: any free port")] = 0,
    seed: Annotated[int, typer.Option(help="of random weights")] = 0,
    tp: Annotated[int, typer.Option(help="tensor-parallel devices")] = 1,
    ep: Annotated[int, typer.Option(help="expert-parallel devices")] = 1,
    slots: Annotated[int, typer.Option(help="sequences at once (0: the engine's choice)")] = 0,
    length: Annotated[int, typer.Option(help="positions of one sequence (0: the engine's choice)")] = 0,
    memory_share: Annotated[float, typer.Option(help="part of the device's memory that it may plan with")] = 1.0,
    record_routing: Annotated[Path | None, typer.Option(help="keep expert choices there (moegate engine)")] = None,
    server_log: Annotated[Path | None, typer.Option(help="keep the server's output there",
                                                  callback=_to_write)] = None,
    announce: Annotated[Path | None, typer.Option(help="written when ready, for `serving bench --launch`",
                                                callback=_to_write)] = None,
    ready_timeout: Annotated[float | None, typer.Option(help="seconds until an unready server has failed")] = None,
    engine_arg: Annotated[list[str] | None, typer.Option(help="passed to the engine as it is; repeatable")] = None,
    command: Annotated[list[str] | None, typer.Argument(help="after `--`: run when the server is ready")] = None,
) -> int:  # fmt: skip
    """Start a server; run COMMAND against it and end it, or serve until SIGTERM.

    Example: serving launch --model examples/models/tiny-moe -- serving bench --requests 8 --concurrency 2 --input 8
    --output 8 --out result.json
    """
    from serving import engines
    from serving.launch import launch as run

    if not 0 < memory_share <= 1:
        raise UsageError(f"is {memory_share:g}", field="memory-share", fix="more than 0, at most 1")
    if ready_timeout is not None and not ready_timeout > 0:
        raise UsageError(f"is {ready_timeout:g}", field="ready-timeout", fix="more than 0 seconds")
    if graph not in ("eager", "full"):
        raise UsageError(f"is {graph!r}", field="graph", fix="eager or full")
    spec = engines.Spec(
        model=_model(model), weights=_folder(weights), dtype=_DTYPES.get(dtype, dtype), backend=moe_runner_backend,
        graph="full" if graph == "full" else "eager", configs=_configs(configs), port=port, seed=seed, tp=tp, ep=ep,
        slots=slots, length=length, memory_share=memory_share, extra=tuple(engine_arg or ()),
        record_routing=None if record_routing is None else record_routing.resolve(),
    )  # fmt: skip
    return run(engines.get(engine), spec, command or (), log=None if server_log is None else server_log.resolve(),
               ready_s=ready_timeout, announce=None if announce is None else announce.resolve())  # fmt: skip


@app.command()
def bench(
    requests: Annotated[int, typer.Option(help="measured requests")],
    input: Annotated[int, typer.Option(help="prompt tokens of each")],
    output: Annotated[int, typer.Option(help="tokens to make for each")],
    out: Out,
    concurrency: Annotated[int | None, typer.Option(help="closed loop: requests in flight")] = None,
    rate: Annotated[float | None, typer.Option(help="open loop: Poisson arrivals per second")] = None,
    seed: Annotated[int, typer.Option(help="of prompts and arrivals")] = 0,
    base_url: BaseUrl = None,
    announced: Announced = None,
    warm_up: Annotated[int | None, typer.Option(help="parallel warm-up requests (at least the concurrency)")] = None,
    vocab: Annotated[int, typer.Option(help="draw prompts from ids below this (0: what the server says)")] = 0,
    metric: Annotated[str, typer.Option(help="the primary metric")] = "output_throughput",
    max_lag: Annotated[float, typer.Option(help="event-loop lag in ms that voids the launch")] = 20.0,
    events: Annotated[Path | None, typer.Option(help="per-request log (JSON lines)", callback=_to_write)] = None,
    rounds: Annotated[int, typer.Option(help="how often the load is put on; a value per round", min=1)] = 1,
    turns: Annotated[Path | None, typer.Option(help="folder of marks: wait there for each round's turn")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="print the metrics as one JSON document")] = False,
) -> int:
    """Put a load on a server and measure it.

    Example: serving bench --launch server.json --requests 64 --concurrency 8 --input 128 --output 64
    --out result.json
    """
    from moegate.records import write
    from serving.launch import launched_from
    from serving.load.bench import Limits
    from serving.load.bench import bench as run
    from serving.load.client import Target
    from serving.load.workload import Workload

    asked = Workload(requests, input, output, seed, vocab or 1, concurrency, rate)  # what is wrong needs no server
    engine, launched = launched_from(base_url, announced)
    model = _served(launched.base_url, announced)
    workload = replace(asked, vocab=vocab or model.vocab or _vocab(launched.spec.model), room=model.room)
    measured = run(
        Target(launched.base_url, model.name), workload, lambda: engine.account(launched), warm_up=warm_up,
        primary=metric, limits=Limits(lag_ms=max_lag), events=events, rounds=rounds, turns=turns,
    )  # fmt: skip
    write(out, measured)
    detail = measured.launches[0].detail
    _say(detail, measured.launches[0].void_reason, json_output)
    return int(Exit.OK if measured.status == "ok" else Exit.REGRESSION)


@app.command()
def accuracy(
    samples: Annotated[Path, typer.Option(help="JSON lines: id, prompt (token ids) and optionally answer")],
    out: Out,
    output: Annotated[int, typer.Option(help="tokens per answer where a sample names none", min=1)] = 32,
    concurrency: Annotated[int, typer.Option(help="requests in flight", min=1)] = 8,
    base_url: BaseUrl = None,
    announced: Announced = None,
    json_output: Annotated[bool, typer.Option("--json", help="print the summary as one JSON document")] = False,
) -> int:
    """Collect greedy answers and their log-probabilities, sample by sample.

    Example: serving launch --model DIR -- serving accuracy --samples examples/samples/ocr-200.jsonl --out answers.json
    """
    from moegate.records import write
    from serving.launch import launched_from
    from serving.load.accuracy import collect, read_samples
    from serving.load.client import Target

    asked = read_samples(samples)
    engine, launched = launched_from(base_url, announced)
    model = _served(launched.base_url, announced)
    measured = collect(Target(launched.base_url, model.name), asked, lambda: engine.account(launched),
                       output=output, concurrency=concurrency)  # fmt: skip
    write(out, measured)
    said = {name: value for name, value in measured.launches[0].detail.items() if isinstance(value, int | float | str)}
    _say(said, measured.launches[0].void_reason, json_output)
    if not json_output and said.get("completed") and not said.get("labelled"):
        print("no sample has an answer: accuracy is how probable the greedy tokens were", file=sys.stderr)
    return int(Exit.OK if measured.status == "ok" else Exit.REGRESSION)


def _served(base_url: str, announced: Path | None) -> Model:
    """The server's model; where a server that a file told of does not answer, what to do about that."""
    from serving.load.bench import find_model

    try:
        return find_model(base_url)
    except InfraError as error:
        if announced is None:
            raise
        fix = f"start one: serving launch --announce {announced}"
        raise InfraError(f"{announced}: {error} (if the server has ended, {fix})") from None


def _model(model: Path) -> Path:
    from moegate.families import config_file

    if not is_file(config_file(model)):
        raise UsageError("no such model", file=model, field="model", fix="a folder with a config.json")
    return model.resolve()


def _folder(weights: str) -> str:
    if weights == "random":
        return weights
    if not is_folder(Path(weights)):
        raise UsageError("no such folder", file=weights, field="weights", fix="a checkpoint folder, or `random`")
    return str(Path(weights).resolve())


def _configs(value: str | None) -> Path | None:
    import os

    from moegate.paths import config_root

    value = value or os.environ.get("MOEGATE_CONFIG_DIR")
    if value is None:
        return config_root() if config_root().is_dir() else None
    if value == "none":
        return None
    if not is_folder(Path(value)):
        raise UsageError("no such folder", file=value, field="configs", fix="a folder of config files, or `none`")
    return Path(value).resolve()


def _vocab(model: Path) -> int:
    """The vocabulary of a model's config; 256 ids that every model has where that is not known."""
    from moegate import canonical
    from moegate.families import config_file

    file = config_file(model)
    config = canonical.load_json(file) if is_file(file) else {}
    nested = [config.get(name) for name in ("text_config", "language_config")]
    sizes = [part.get("vocab_size") for part in [*nested, config] if isinstance(part, dict)]
    return next((int(size) for size in sizes if size), 256)


def _say(numbers: dict[str, Any], void: str | None, as_json: bool) -> None:
    if as_json:
        json.dump({**numbers, "void_reason": void}, sys.stdout)
        print()
        return
    from serving.load.metrics import lines

    for line in lines(numbers):
        print(line)
    if void:
        print(f"void: {void}", file=sys.stderr)
