"""Writes `ocr-200.jsonl`: 200 prompts of token ids, made from a seed and from nobody's data.

They look to a router as pages of text do: a common prefix of instruction ids, then runs in which a few ids come back
often (a page repeats its words) among many that are rare. Ids stay below 512, so that every model can read them.

    python examples/samples/make.py > examples/samples/ocr-200.jsonl
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

SEED, SAMPLES, VOCAB = 20281, 200, 512
INSTRUCTION = (2, 17, 91, 33, 8)


def lines() -> Iterator[str]:
    """One JSON line per sample."""
    draw = random.Random(SEED)  # noqa: S311 - reproducible, not secret
    for index in range(SAMPLES):
        common = draw.sample(range(16, VOCAB), 12)
        length = draw.randint(12, 60)
        page = [draw.choice(common) if draw.random() < 0.6 else draw.randrange(16, VOCAB) for _ in range(length)]
        yield json.dumps({"id": f"ocr-{index:03d}", "prompt": [*INSTRUCTION, *page]}, separators=(",", ":"))


if __name__ == "__main__":
    for line in lines():
        print(line)
