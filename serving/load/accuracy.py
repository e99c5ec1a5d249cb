"""`serving accuracy`: greedy answers and their log-probabilities over a fixed set of samples, one launch.

Two launches are compared sample by sample, so a launch keeps each sample's answer, log-probabilities and score. A
labelled sample (one with `answer`) scores 1 where the answer is met token by token, else 0. An unlabelled one scores
the geometric mean probability of its own greedy tokens: it says how sure the model is, and a wrong kernel that blurs
logits lowers it.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from moegate import canonical
from moegate.errors import UsageError
from moegate.records import Launch, Measurement, Samples
from serving import apikey
from serving.account import Account
from serving.load.client import Target, refusal

__all__ = ["Answer", "Sample", "collect", "read_samples", "score"]

MAX_SAMPLES = 100_000


@dataclass(frozen=True)
class Sample:
    """One question: token ids, how many tokens to make (0: the command's default), and the right answer if known."""

    id: str
    prompt: tuple[int, ...]
    output: int = 0
    answer: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Answer:
    """What a server said: token ids (empty where it tells only text), text, and each token's log-probability."""

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]


def read_samples(path: Path) -> tuple[Sample, ...]:
    """Read a `.jsonl` file. UsageError with file and line for anything that is not a sample, or an id given twice."""
    try:
        lines = canonical.read_file(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(str(error), file=path) from None
    samples: dict[str, Sample] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        sample = _sample(canonical.loads_json(line, file=f"{path}:{number}"), path, number)
        if sample.id in samples:
            raise UsageError(f"id {sample.id!r} appears twice", file=path, line=number)
        samples[sample.id] = sample
    if not 0 < len(samples) <= MAX_SAMPLES:
        raise UsageError(f"holds {len(samples)} samples; 1 to {MAX_SAMPLES} are read", file=path)
    return tuple(samples.values())


def _sample(row: Any, path: Path, number: int) -> Sample:
    def ids(name: str) -> tuple[int, ...]:
        value = row.get(name)
        if not isinstance(value, list) or not value or not all(type(item) is int and item >= 0 for item in value):
            raise UsageError("must be a list of token ids", file=path, line=number, field=name)
        return tuple(value)

    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        raise UsageError("must be an object with a text `id`", file=path, line=number, field="id")
    output = row.get("output", 0)
    if type(output) is not int or output < 0:
        raise UsageError("must be a number of tokens", file=path, line=number, field="output")
    answer = ids("answer") if row.get("answer") is not None else None
    return Sample(row["id"], ids("prompt"), output or (len(answer) if answer else 0), answer)


def collect(
    target: Target,
    samples: Sequence[Sample],
    account: Callable[[], Account],
    *,
    output: int,
    concurrency: int,
) -> Measurement:
    """Ask every sample once and return the Measurement of one launch (kind `accuracy`)."""
    started, began = datetime.now(UTC).isoformat(timespec="milliseconds"), time.perf_counter()
    answers, errors = asyncio.run(_ask_all(target, samples, output, concurrency))
    wall = time.perf_counter() - began
    about = account()
    scores = {sample.id: score(sample, answers[sample.id]) for sample in samples if sample.id in answers}
    mean = sum(scores.values()) / len(scores) if scores else 0.0
    void = None
    if errors:
        first = next(iter(errors.values()))
        void = f"{len(errors)} of {len(samples)} samples got no answer: {first}"
    detail = {
        "completed": len(answers),
        "accuracy": mean,
        "labelled": sum(sample.answer is not None for sample in samples),
        "input_sha256": canonical.digest([[s.id, s.prompt, s.output or output, s.answer] for s in samples]),
        "scores": scores,
        "answers": {name: {"tokens": answer.tokens, "text": answer.text if not answer.tokens else "",
                           "logprobs": answer.logprobs} for name, answer in answers.items()},
    }  # fmt: skip
    launch = Launch(
        device=about.device,
        started=started,
        wall_s=wall,
        samples=(Samples("accuracy", "fraction", "higher", (mean,), True),) if scores else (),
        proof=about.proof,
        peak_memory_bytes=about.peak_memory_bytes,
        batch_sizes=about.batch_sizes,
        void_reason=void,
        detail=detail,
    )
    return Measurement(
        kind="accuracy",
        status="failed" if errors else "ok",
        device=about.device,
        environment=about.environment,
        work={"samples": len(answers)},
        launches=(launch,),
        interpreter=about.interpreter,
        failure=void,
    )


def score(sample: Sample, answer: Answer) -> float:
    """A sample's score, 0 to 1; see the module."""
    if sample.answer is not None:
        return float(answer.tokens[: len(sample.answer)] == sample.answer)
    if not answer.logprobs:
        return 0.0
    return min(1.0, math.exp(sum(answer.logprobs) / len(answer.logprobs)))


async def _ask_all(
    target: Target, samples: Sequence[Sample], output: int, concurrency: int
) -> tuple[dict[str, Answer], dict[str, str]]:
    answers: dict[str, Answer] = {}
    errors: dict[str, str] = {}
    work = iter(samples)
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)

    async with aiohttp.ClientSession(timeout=timeout, headers=apikey.headers()) as session:

        async def lane() -> None:
            for sample in work:
                try:
                    answers[sample.id] = await _ask(session, target, sample, sample.output or output)
                except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
                    errors[sample.id] = f"{type(error).__name__}: {error}"[:300]

        await asyncio.gather(*(lane() for _ in range(min(concurrency, len(samples)))))
    return {sample.id: answers[sample.id] for sample in samples if sample.id in answers}, errors


async def _ask(session: aiohttp.ClientSession, target: Target, sample: Sample, output: int) -> Answer:
    body = {"model": target.model, "prompt": sample.prompt, "max_tokens": output, "temperature": 0,
            "ignore_eos": True, "logprobs": 1, "return_token_ids": True}  # fmt: skip
    async with session.post(target.url, json=body) as response:
        if response.status != 200:
            raise ValueError(await refusal(response))
        choice = json.loads(await response.read())["choices"][0]
    logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"] if value is not None]
    return Answer(tuple(choice.get("token_ids") or ()), str(choice.get("text", "")), tuple(logprobs))
