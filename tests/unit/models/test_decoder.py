"""Our packed decoder against transformers' own models, fp32, over a pool of NaN (fault B032)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from legato_worker.models.base import PackedModel
from legato_worker.models.loader import load_decoder
from transformers import PreTrainedModel

from .families import FAMILIES, SIZES, save_model
from .packed import PackedSequences

TOLERANCE = 1e-4
VOCAB_SIZE = SIZES["vocab_size"]
Pair = tuple[PreTrainedModel, PackedModel]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """(transformers' model, ours from the folder that it saved)."""
    folder = tmp_path_factory.mktemp("model")
    return save_model(request.param, folder), load_decoder(folder, torch.float32)


def random_ids(count: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (count,), generator=random).tolist()


def own_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.1, "logits too flat to tell anything"
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_one_shot(pair: Pair) -> None:
    theirs, ours = pair
    ids = random_ids(61, seed=1)
    assert_close(PackedSequences(ours, 1).step({0: ids})[0], own_logits(theirs, ids))


def test_chunks_of_seven(pair: Pair) -> None:
    theirs, ours = pair
    ids = random_ids(61, seed=2)
    sequences = PackedSequences(ours, 1)
    chunks = [sequences.step({0: ids[i : i + 7]})[0] for i in range(0, len(ids), 7)]
    assert_close(torch.cat(chunks), own_logits(theirs, ids))


def test_packed_rows_of_all_kinds(pair: Pair) -> None:
    """Prompts, chunks and single tokens of five sequences share steps, joining as others go on."""
    theirs, ours = pair
    ids = [random_ids(length, seed) for seed, length in enumerate((40, 23, 9, 30, 1))]
    sequences = PackedSequences(ours, 5)
    got: list[list[torch.Tensor]] = [[] for _ in ids]

    def portions() -> Iterator[dict[int, int]]:
        yield {0: 33, 1: 5}
        yield {0: 1, 1: 7, 2: 8}
        yield {2: 1, 3: 25, 0: 1, 4: 1}
        yield {3: 1, 1: 10, 0: 1}
        for _ in range(4):
            yield {0: 1, 3: 1}
        yield {1: 1}

    for portion in portions():
        taken = {s: ids[s][sequences.lengths[s] :][:count] for s, count in portion.items()}
        for sequence, logits in sequences.step(taken).items():
            got[sequence].append(logits)
    assert sequences.lengths == [len(i) for i in ids]
    for sequence, all_ids in enumerate(ids):
        assert_close(torch.cat(got[sequence]), own_logits(theirs, all_ids))
