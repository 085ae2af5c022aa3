"""64 prompts of mixed length and kind, as ids of SmolLM2's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).resolve().parent / "golden" / "smollm2_greedy_fp32.json"
NUM_PROMPTS = 64
NUM_TOKENS = 128

OPENINGS = (
    "The",
    "Once upon a time",
    "def fibonacci(n):\n",
    "1, 2, 3, 5, 8, 13, 21, 34,",
    "Dear Sir or Madam,\n\n",
    "In 1969, 3 astronauts flew 384,400 km;",
    '{"name": "Ada", "born": 1815, ',
    "Die Katze sitzt auf dem",
    "Q: What is the capital of France?\nA:",
    "# Shopping list\n- eggs\n- ",
)


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Short openings, pieces of the licence text of 3 to 230 tokens, and chats."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    licence = tokenizer.encode(text).ids
    found = [tokenizer.encode(opening).ids for opening in OPENINGS]
    for number in range(NUM_PROMPTS - 2 * len(OPENINGS)):
        start, length = 37 * number, 3 + (number * 53) % 228
        found.append(licence[start : start + length])
    for opening in OPENINGS:
        chat = f"<|im_start|>user\nGo on: {opening}<|im_end|>\n<|im_start|>assistant\n"
        found.append(tokenizer.encode(chat).ids)
    return found


def golden() -> list[list[int]]:
    """What transformers' ``generate`` answers, 128 tokens each, greedy, fp32, end ids ignored."""
    answers: list[list[int]] = json.loads(GOLDEN.read_text(encoding="utf-8"))["answers"]
    return answers
