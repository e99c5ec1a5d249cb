"""The command line. Commands import what they need when they run, so that help is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegate.records.plan import MOST_PAIRS
from tuner.commands import FEW_SIZES, MOST_TOKENS
from tuner.commands.compile import register as register_compile
from tuner.commands.options import PATH, not_empty, place

__all__ = ["app"]

app = typer.Typer(
    name="tuner",
    help="Find, check and compare kernel configs for MoE and FP8 kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_FEW = ",".join(map(str, FEW_SIZES))
Model = Annotated[Path | None, typer.Option(**PATH, help="A Hugging Face config.json or its folder; or --shape.")]
Shape = Annotated[str | None, typer.Option(help="Instead of a model: E=64,N=896,H=1280,topk=6.")]
Op = Annotated[str, typer.Option(help="fused_experts, block_fp8_linear or store_kv_cache.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or fp8_w8a8.")]
Sizes = Annotated[
    str,
    typer.Option(
        "--batch-sizes",
        help=f"Tokens of a step, comma-separated, each at most {MOST_TOKENS}; default: the 18 sizes of SGLang's tuner, "
        f"1 to 4096 (under Triton's interpreter: {_FEW}).",
    ),
]
Engine = Annotated[str, typer.Option(help="Whose kernel: moegate, sglang or vllm.")]
Routing = Annotated[str, typer.Option(help="uniform, skewed, or a folder of recorded routing.", callback=not_empty)]
Tp = Annotated[int, typer.Option(min=1, help="Tensor-parallel size, of a model.")]
Ep = Annotated[int, typer.Option(min=1, help="Expert-parallel size, of a model.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Record = Annotated[Path | None, typer.Option(**PATH, help="Where to write the measurement record.", callback=place)]
_STEPS = f"Tokens of a step, comma-separated, each at most {MOST_TOKENS}; default: {_FEW}."
# torch takes 64 bits with a sign, and what is drawn adds to the seed.
_MOST_SEED = (1 << 62) - 1
# Samples of one thing: more take longer than anybody waits, and say no more.
_MOST_TIMES = 10_000
Seed = Annotated[int, typer.Option(min=0, max=_MOST_SEED, help="Seed of weights, inputs and routing.")]
Python = Annotated[str | None, typer.Option(help="Interpreter of the engine's own environment.", callback=not_empty)]


@app.command()
def tune(
    out: Annotated[
        Path, typer.Option(**PATH, help="Folder for configs, journal and logs; a started one is gone on with.")
    ],
    model: Model = None,
    shape: Shape = None,
    op: Op = "fused_experts",
    dtype: Dtype = "auto",
    device: Annotated[str, typer.Option(help="auto: the device of this process; cpu: Triton's interpreter.")] = "auto",
    effort: Annotated[str, typer.Option(help="quick, full or exhaustive.")] = "full",
    batch_sizes: Sizes = "",
    budget: Annotated[
        str | None,
        typer.Option(
            help="Time for all of it: 45s, 3m or 1h30m (a bare number is seconds). Most goes to the search; what that "
            "leaves out is listed at the end."
        ),
    ] = None,
    engine: Engine = "moegate",
    strategy: Annotated[str, typer.Option(help="racing, exhaustive or random.")] = "racing",
    no_prior: Annotated[bool, typer.Option("--no-prior", help="Search as on a vendor nobody tuned yet.")] = False,
    without: Annotated[str, typer.Option(help="Architectures that the prior leaves out: sm_90,sm_100.")] = "",
    routing: Routing = "uniform",
    ray: Annotated[
        str | None, typer.Option(help="Lease batch-size groups to the GPUs of this Ray cluster.", callback=not_empty)
    ] = None,
    emit: Annotated[
        str, typer.Option(help="sglang, or sglang,vllm for vLLM's spelling too.", callback=not_empty)
    ] = "sglang",
    tp: Tp = 1,
    ep: Ep = 1,
    seed: Seed = 0,
    python: Python = None,
    result: Record = None,
    as_json: Json = False,
) -> None:
    """Tune both projections of an op for all batch sizes.

    Example: tuner tune --model examples/models/deepseek-ocr-2 --effort full --out tuned
    """
    from tuner.commands.tune import run

    raise typer.Exit(
        run(out=out, model=model, shape=shape, op=op, dtype=dtype, device=device, effort=effort,
            batch_sizes=batch_sizes, budget=budget, engine=engine, strategy=strategy, no_prior=no_prior,
            without=without, routing=routing, ray=ray, emit=emit, tp=tp, ep=ep, seed=seed, python=python,
            result=result, as_json=as_json)
    )  # fmt: skip


@app.command()
def bench(
    model: Model = None,
    shape: Shape = None,
    op: Op = "fused_experts",
    dtype: Dtype = "auto",
    batch_sizes: Annotated[str, typer.Option(help=_STEPS)] = "",
    configs: Annotated[str, typer.Option(help="A folder of config files, or none.", callback=not_empty)] = "none",
    moe_runner_backend: Annotated[str, typer.Option(help="auto, triton or torch.")] = "auto",
    graph: Annotated[str, typer.Option(help="eager or full.")] = "eager",
    seed: Seed = 0,
    engine: Engine = "moegate",
    tp: Tp = 1,
    ep: Ep = 1,
    routing: Routing = "uniform",
    reps: Annotated[int, typer.Option(min=0, max=_MOST_TIMES, help="Timed replays per batch size; 0 chooses.")] = 0,
    out: Record = None,
    as_json: Json = False,
) -> None:
    """Time the op with the configs that the look-up gives: one launch of one process.

    Example: tuner bench --model examples/models/tiny-moe --dtype float32 --batch-sizes 1,8 --configs tuned
    """
    from tuner.commands.bench import run

    raise typer.Exit(
        run(model=model, shape=shape, op=op, dtype=dtype, batch_sizes=batch_sizes, configs=configs,
            backend=moe_runner_backend, graph=graph, seed=seed, engine=engine, tp=tp, ep=ep, routing=routing, reps=reps,
            out=out, as_json=as_json)
    )  # fmt: skip


@app.command()
def verify(
    ops: Annotated[str, typer.Option(help="Comma-separated ops, or all.")] = "all",
    dtypes: Annotated[str, typer.Option(help="Comma-separated; fp8_w8a8 too.")] = "float32,bfloat16,float16",
    backend: Annotated[str, typer.Option(help="triton, torch or all.")] = "all",
    out: Record = None,
    as_json: Json = False,
) -> None:
    """Hold ops that have a check against their twins, over dtypes and odd shapes.

    Example: tuner verify --ops fused_experts --dtypes float32,bfloat16 --out result.json
    """
    from tuner.commands.verify import run

    raise typer.Exit(run(ops=ops, dtypes=dtypes, backend=backend, out=out, as_json=as_json))


@app.command()
def replay(
    journal: Annotated[
        Path, typer.Option(**PATH, help="A journal of an exhaustive tuning, or a recorded sweep (.json.gz).")
    ],
    strategy: Annotated[str, typer.Option(help="racing, exhaustive or random.")] = "racing",
    effort: Annotated[str, typer.Option(help="quick, full or exhaustive.")] = "full",
    no_prior: Annotated[bool, typer.Option("--no-prior", help="Search as on a vendor nobody tuned yet.")] = False,
    without: Annotated[str, typer.Option(help="Architectures that the prior leaves out: sm_90,sm_100.")] = "",
    seed: Annotated[int, typer.Option(min=0, max=_MOST_SEED, help="Seed of what the strategy draws.")] = 0,
    out: Annotated[
        Path | None, typer.Option(**PATH, help="Keep a journal and the chosen configs here; resumable.")
    ] = None,
    delay_ms: Annotated[float, typer.Option(min=0.0, help="Let every evaluation take this long.")] = 0.0,
    noise: Annotated[int, typer.Option(help="Also search under noise and play the finals, over so many seeds.")] = 0,
    as_json: Json = False,
) -> None:
    """Replay a recorded sweep: evaluations that a strategy needs, and its regret.

    Example: tuner replay --journal tuned/journal --strategy racing --without sm_90
    """
    from tuner.commands.replay import run

    raise typer.Exit(
        run(journal=journal, strategy=strategy, effort=effort, no_prior=no_prior, without=without, seed=seed, out=out,
            delay_ms=delay_ms, noise=noise, as_json=as_json)
    )  # fmt: skip


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="A folder of config files, or none.", callback=not_empty)],
    b: Annotated[str, typer.Argument(help="Another one, held against the first.", callback=not_empty)],
    model: Model = None,
    shape: Shape = None,
    op: Op = "fused_experts",
    dtype: Dtype = "auto",
    batch_sizes: Sizes = "",
    launches: Annotated[
        int, typer.Option(min=1, max=MOST_PAIRS, help="Fresh processes; each counts once. A verdict takes 5.")
    ] = 5,
    rounds: Annotated[
        int, typer.Option(min=1, max=_MOST_TIMES, help="Alternating rounds per batch size in a process.")
    ] = 4,
    margin: Annotated[float, typer.Option(help="Relative difference that matters.")] = 0.01,
    engine: Engine = "moegate",
    routing: Routing = "uniform",
    seed: Seed = 0,
    python: Python = None,
    as_json: Json = False,
) -> None:
    """Measure two config sets against each other, whole ops, with an interval and a verdict per batch size.

    Example: tuner compare none tuned --model examples/models/deepseek-ocr-2
    """
    from tuner.commands.compare import run

    raise typer.Exit(
        run(a=a, b=b, model=model, shape=shape, op=op, dtype=dtype, batch_sizes=batch_sizes, launches=launches,
            rounds=rounds, margin=margin, engine=engine, routing=routing, seed=seed, python=python, as_json=as_json)
    )  # fmt: skip


@app.command()
def emit(
    source: Annotated[Path, typer.Argument(**{**PATH, "metavar": "source"}, help="A folder of tuned config files.")],
    target: Annotated[str, typer.Option("--for", help="sglang or vllm.")],
    out: Annotated[Path, typer.Option(**PATH, help="Folder to write into.")],
    as_json: Json = False,
) -> None:
    """Write tuned files in an engine's spelling, without the fields that its loader drops.

    Example: tuner emit tuned --for vllm --out tuned-vllm
    """
    from tuner.commands.emit import run

    raise typer.Exit(run(target=target, source=source, out=out, as_json=as_json))


register_compile(app)
