"""Small real tokenizers of the families that matter for decoding, built in a moment."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it runs away. 0123456789",
    "Hello world! I am testing a stream: the words, the spaces and the stops.",
    "def main():\n    return sum(range(10))  # indented\n\n\nUser: hi\nAssistant: hello",
] * 3
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen, SmolLM: any byte is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(tokenizer, alphabet)
    return tokenizer


@cache
def llama_bpe() -> Tokenizer:
    """Llama 2: BPE with byte fallback; one leading space is stripped from the whole text."""
    tokenizer = _with_byte_fallback()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    _prepend_bos(tokenizer)
    return tokenizer


@cache
def metaspace_unigram() -> Tokenizer:
    """SentencePiece Unigram with byte fallback and a Metaspace decoder."""
    pieces = list(json.loads(_with_byte_fallback().to_str())["model"]["vocab"])
    vocab = [(piece, -10.0 / len(piece)) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    _prepend_bos(tokenizer)
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama_bpe": llama_bpe,
    "metaspace_unigram": metaspace_unigram,
}


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """Ids of vocabulary entries, by their names."""
    found = []
    for piece in pieces:
        token_id = tokenizer.token_to_id(piece)
        assert token_id is not None, piece
        found.append(token_id)
    return found


def fallback_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """One byte-fallback id per byte."""
    return ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in raw))


def _train(tokenizer: Tokenizer, alphabet: list[str]) -> None:
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(t, special=True) for t in SPECIAL_TOKENS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)


def _with_byte_fallback() -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    _train(trained, ["▁"])
    model = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    for piece in [f"<0x{byte:02X}>" for byte in range(256)] + ["▁▁", "▁▁▁▁"]:
        vocab.setdefault(piece, len(vocab))
    merges = [tuple(pair) for pair in model["merges"]] + [("▁", "▁"), ("▁▁", "▁▁")]
    bpe = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def _prepend_bos(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
