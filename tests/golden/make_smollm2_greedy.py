"""Writes smollm2_greedy_fp32.json with transformers' own ``generate``, one prompt at a time.

``python -m tests.golden.make_smollm2_greedy`` (some ten minutes). Legato is not involved.
"""

from __future__ import annotations

import json
import time

import torch
import transformers
from legato_deploy.store import ModelStore, default_root
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.smollm2_prompts import GOLDEN, NUM_TOKENS, prompts


@torch.inference_mode()
def main() -> None:
    folder = ModelStore(default_root()).get("smollm2-135m-instruct").path
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.set_num_threads(1)  # two threads that wait for each other are slower on a busy machine
    model.generation_config.eos_token_id = None
    started, answers = time.monotonic(), []
    for ids in prompts(tokenizer):
        inputs = torch.tensor([ids])
        out = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=2,
            eos_token_id=None,
        )
        answers.append(out[0, len(ids) :].tolist())
        print(f"{len(answers)} after {time.monotonic() - started:.0f} s", flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    lines = ",\n".join(json.dumps(answer) for answer in answers)
    GOLDEN.write_text(
        f'{{"versions": {json.dumps(versions)}, "answers": [\n{lines}\n]}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    main()
