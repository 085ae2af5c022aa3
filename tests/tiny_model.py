"""A model folder that is complete and tiny: a byte-level tokenizer of some hundred ids, and weights
that nobody runs (the simulated runner makes its text up)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.small_tokenizers import byte_level

VOCAB_SIZE = byte_level().get_vocab_size()
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def build(folder: Path, *, chat: bool = False) -> Path:
    """Writes the model into ``folder`` and returns it. ``chat``: with a chat template (which costs
    a router the import of transformers)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "vocab_size": VOCAB_SIZE}
    (folder / "config.json").write_text(json.dumps(config))
    byte_level().save(str(folder / "tokenizer.json"))
    save_file({"weight": np.zeros(4, np.float32)}, folder / "model.safetensors")
    if chat:
        template = {"chat_template": CHAT_TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(template))
    return folder
