"""`/v1/completions`: what a body may say, and what the answer looks like.

Prompts are token ids, because this server has no tokenizer; its text is the ids again (` 17 4 230`), so that clients
that look for text find some, and `token_ids` carries them as numbers. Decoding is greedy. What a body asks for beyond
that is refused with a 400 that names the field; fields that change nothing here are let pass.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.server.link import Token

__all__ = ["BadRequest", "Completion", "Limits", "Writer", "parse"]

MAX_LOGPROBS = 1

# field -> values that are as good as absent; anything else asks for what this server does not do
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (None, 0, 0.0),
    "top_p": (None, 1, 1.0),
    "top_k": (None, -1, 0, 1),
    "min_p": (None, 0, 0.0),
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "stop": (None, [], ""),
    "stop_token_ids": (None, []),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "use_beam_search": (None, False),
}


class BadRequest(Exception):
    """A body that cannot be served; `field` names what is wrong with it."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.field, self.status = message, field, status


@dataclass(frozen=True)
class Limits:
    """What the loaded model allows: vocabulary, positions of one sequence, and the name it is served under."""

    vocab: int
    length: int
    model: str


@dataclass(frozen=True)
class Completion:
    """A body that can be served."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    logprobs: bool
    stream: bool
    usage: bool

    def request(self) -> dict[str, Any]:
        """What the worker needs of it."""
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "ignore_eos": self.ignore_eos,
            "logprobs": self.logprobs,
        }


def parse(raw: bytes, limits: Limits) -> Completion:
    """Read a body; BadRequest with the field that is wrong."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be an object")
    model = body.get("model", limits.model)
    if model != limits.model:
        raise BadRequest(f"the model {str(model)[:80]!r} does not exist; this is {limits.model!r}", "model", 404)
    for name, neutral in _NEUTRAL.items():
        if name in body and not any(body[name] is value or body[name] == value for value in neutral):
            raise BadRequest(f"{name} = {json.dumps(body[name])[:80]} is not supported: decoding is greedy", name)
    prompt = _prompt(body.get("prompt"), limits)
    max_tokens = _integer(body, "max_tokens", 16, 1, limits.length)
    if len(prompt) + max_tokens > limits.length:
        raise BadRequest(f"{len(prompt)} + {max_tokens} tokens exceed the {limits.length} positions here", "prompt")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", "stream_options")
    return Completion(
        prompt=prompt,
        max_tokens=max_tokens,
        ignore_eos=_flag(body, "ignore_eos"),
        logprobs=body.get("logprobs") is not None and _integer(body, "logprobs", 0, 0, MAX_LOGPROBS) >= 0,
        stream=_flag(body, "stream"),
        usage=_flag(options, "include_usage"),
    )


def _prompt(value: Any, limits: Limits) -> list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    if isinstance(value, str) or (isinstance(value, list) and any(isinstance(item, str | list) for item in value)):
        raise BadRequest("this server has no tokenizer and answers one prompt: send a list of token ids", "prompt")
    if not isinstance(value, list) or not value:
        raise BadRequest("prompt must be a list of token ids", "prompt")
    for token in value:
        if type(token) is not int or not 0 <= token < limits.vocab:
            raise BadRequest(f"{str(token)[:40]} is no token id: 0 to {limits.vocab - 1}", "prompt")
    return value


def _integer(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(f"{name} must be an integer from {low} to {high}", name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false", name)
    return value


class Writer:
    """Writes the answer of one request, in whichever form it was asked for.

    Besides OpenAI's fields the last chunk (or the answer) has `timing`: seconds on the server's own clock from the
    arrival of the body to the first and to the last token, which tells the server's share from the network's.
    """

    def __init__(self, number: int, model: str, completion: Completion, arrived: float) -> None:
        self._completion = completion
        self._arrived = arrived
        self._head = {
            "id": f"cmpl-{number}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        head = json.dumps(self._head, separators=(",", ":"))
        self._prefix = f'data: {head[:-1]},"choices":[{{"index":0,"text":"'
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish: str | None = None
        self._first = self._last = 0.0

    def take(self, batch: list[Token]) -> None:
        """Note tokens that go out next."""
        if not self.tokens:
            self._first = batch[0][3]
        self._last = batch[-1][3]
        self.tokens += [token for token, *_ in batch]
        if self._completion.logprobs:
            self.logprobs += [chance for _, _, chance, _ in batch if chance is not None]
        self.finish = batch[-1][1]

    def chunk(self, batch: list[Token]) -> bytes:
        """One event of a stream, holding all tokens of `batch`."""
        self.take(batch)
        ids = [token for token, *_ in batch]
        tail = "null" if self.finish is None else f'"{self.finish}"'
        chances = "null"
        if self._completion.logprobs:
            chances = json.dumps({"token_logprobs": [chance for _, _, chance, _ in batch]}, separators=(",", ":"))
        text = "".join(f" {token}" for token in ids)
        numbers = ",".join(map(str, ids))
        return (f'{self._prefix}{text}","token_ids":[{numbers}],"logprobs":{chances},"finish_reason":{tail}}}]}}\n\n'
                ).encode()  # fmt: skip

    def end(self) -> bytes:
        """The last events of a stream: usage where it was asked for, then `[DONE]`."""
        done = b"data: [DONE]\n\n"
        if not self._completion.usage:
            return done
        last = {**self._head, "choices": [], "usage": self._usage(), "timing": self._timing()}
        return b"data: " + json.dumps(last, separators=(",", ":")).encode() + b"\n\n" + done

    def whole(self) -> dict[str, Any]:
        """The whole answer of a request that did not ask for a stream."""
        choice = {
            "index": 0,
            "text": "".join(f" {token}" for token in self.tokens),
            "token_ids": self.tokens,
            "logprobs": {"token_logprobs": self.logprobs} if self._completion.logprobs else None,
            "finish_reason": self.finish,
        }
        return {**self._head, "choices": [choice], "usage": self._usage(), "timing": self._timing()}

    def _usage(self) -> dict[str, int]:
        asked, made = len(self._completion.prompt), len(self.tokens)
        return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}

    def _timing(self) -> dict[str, float]:
        return {"ttft_s": round(self._first - self._arrived, 6), "latency_s": round(self._last - self._arrived, 6)}
