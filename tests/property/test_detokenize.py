"""Any text, any chunking, any stop strings: the streamed text is the one-shot decode, cut where a
plain search cuts it (B046, B052, B053, B055, B056, B058)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings, strategies as st
from legato_router.detokenize import MAX_PENDING_IDS, Detokenizer, TextStream
from legato_router.stop import StopStrings
from tokenizers import Tokenizer

from tests.small_tokenizers import (
    FAMILIES,
    SPECIAL_TOKENS,
    byte_level,
    fallback_ids,
    ids_of,
    llama_bpe,
    metaspace_unigram,
)

PIECES = [
    *" \n\t.,!aeinorst",
    "  ",
    "    ",
    "the ",
    "Hello",
    "안녕하세요",
    "값",
    "你好",
    "𠀀",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "é",
    "e\u0301",
    "�",
    "<|im_end|>",
]
texts = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
families = st.sampled_from(sorted(FAMILIES)).map(lambda name: FAMILIES[name]())


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    return text


def chunks_of(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """``ids`` in pieces of the given sizes, over and over."""
    chunks, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        chunks.append(ids[start : start + size])
        start, turn = start + size, turn + 1
    return chunks


def streamed(stream: TextStream, ids: Sequence[int], sizes: Sequence[int]) -> str:
    return "".join(stream.push(chunk).text for chunk in chunks_of(ids, sizes)) + stream.finish()


def answer_text(tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """The oracle: prompt and answer decoded in one go, less the prompt's text. What is unfinished
    at the prompt's end counts as its text too, unless the answer makes something else of it."""
    whole = decode(tokenizer, [*prompt, *answer])
    for end in range(len(prompt), -1, -1):
        finished = decode(tokenizer, prompt[:end])
        if whole.startswith(finished) and not finished.endswith("�"):
            return whole[len(finished) :].removeprefix(decode(tokenizer, prompt[end:]))
    raise AssertionError("the empty prompt always fits")


chunk_sizes = st.lists(st.integers(1, 7), min_size=1, max_size=5)


@given(families, texts, st.integers(0, 60), chunk_sizes)
@settings(max_examples=400, deadline=None)
@example(llama_bpe(), "안녕하세요" * 3, 37, [1])
@example(byte_level(), "a� b", 4, [1])
def test_streamed_text_is_the_one_shot_decode(
    tokenizer: Tokenizer, text: str, prompt_len: int, sizes: list[int]
) -> None:
    """B055, B056, B058. The prompt may end anywhere, within a character too."""
    ids = tokenizer.encode(text).ids
    prompt, answer = ids[:prompt_len], ids[prompt_len:]
    expected = answer_text(tokenizer, prompt, answer)
    assert streamed(TextStream(tokenizer, prompt), answer, sizes) == expected


@given(st.lists(st.one_of(st.integers(0, 400), st.integers(190, 260)), max_size=80), chunk_sizes)
@settings(max_examples=300, deadline=None)
def test_ids_that_are_no_text_at_all(ids: list[int], sizes: list[int]) -> None:
    """Byte-level ids at random: broken bytes, special tokens, ids that the tokenizer lacks."""
    tokenizer = byte_level()
    assert streamed(TextStream(tokenizer), ids, sizes) == decode(tokenizer, ids)


def with_broken_runs_spelled_out(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """``ids``, in which the bytes of a broken byte-fallback run that no stream can have given yet
    are replaced by those of U+FFFD, one each, so that a one-shot decode shows what a stream can."""
    if tokenizer is byte_level():  # there, a broken byte concerns itself alone
        return list(ids)
    spelled: list[int] = []
    run = bytearray()
    for token_id, name in [*((i, tokenizer.id_to_token(i)) for i in ids), (-1, ".")]:
        if name is None or name in SPECIAL_TOKENS:
            continue
        if name.startswith("<0x"):
            run.append(int(name[3:5], 16))
            continue
        given = next(k for k in range(len(run), -1, -1) if is_given(run, k))
        spelled += fallback_ids(tokenizer, bytes(run[:given]))
        spelled += fallback_ids(tokenizer, "�".encode() * (len(run) - given))
        spelled.append(token_id)
        run.clear()
    return spelled[:-1]


def is_given(run: bytearray, length: int) -> bool:
    """Whether the first bytes of a run are whole characters, the last surely finished."""
    try:
        text = run[:length].decode()
    except UnicodeDecodeError:
        return False
    return length == len(run) or not text.endswith("�")


@given(
    st.sampled_from([llama_bpe(), metaspace_unigram()]),
    st.lists(st.one_of(st.integers(0, 480), st.sampled_from(["你", "안", "é", "𠀀"])), max_size=40),
    chunk_sizes,
)
@settings(max_examples=400, deadline=None)
def test_broken_byte_fallback_runs(
    tokenizer: Tokenizer, parts: list[int | str], sizes: list[int]
) -> None:
    """The decoder takes back a whole run of byte tokens when a later one breaks it: characters
    already given stand, and the rest of the run becomes U+FFFD."""
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else fallback_ids(tokenizer, part.encode())
    expected = decode(tokenizer, with_broken_runs_spelled_out(tokenizer, ids))
    assert streamed(TextStream(tokenizer), ids, sizes) == expected


@given(
    families,
    st.integers(0, 3),
    st.integers(MAX_PENDING_IDS - 8, 3 * MAX_PENDING_IDS),
    st.sampled_from(["", "b", " b", "안녕", "𠀀 b", "�"]),
)
@settings(max_examples=300, deadline=None)
def test_many_unfinished_ids_change_no_text(
    tokenizer: Tokenizer, kind: int, num_many: int, text: str
) -> None:
    """More pending ids than are kept: replacement characters as such, broken bytes, special ids;
    then a character that is cut wherever the limit falls."""
    [special] = ids_of(tokenizer, "<|im_end|>")
    broken = tokenizer.encode("你").ids[-1]
    fillers: list[list[int]] = [
        tokenizer.encode("x�").ids[-3:],
        [broken],
        [special],
        [special, broken],
    ]
    filler = fillers[kind]
    many = filler * (num_many // len(filler))
    if broken in filler and tokenizer is not byte_level():
        text = "b" + text  # a long broken run is given up in parts, each decoded by itself
    before = tokenizer.encode("a").ids
    ids = [*before, *many, *tokenizer.encode("a" + text).ids[len(before) :]]
    expected = decode(tokenizer, with_broken_runs_spelled_out(tokenizer, ids))
    assert streamed(TextStream(tokenizer), ids, [1]) == expected


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of ``text`` that is a true prefix of a stop string."""
    return max(
        (k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])), default=0
    )


def first_match(
    text: str, owners: Sequence[int], stops: Sequence[str], min_tokens: int
) -> tuple[int, str] | None:
    """End and string of the stop that is complete first, by plain search over the whole text."""
    best: tuple[int, int, str] | None = None
    for stop in stops:
        start = text.find(stop)
        while start >= 0:
            end = start + len(stop)
            if owners[end - 1] >= min_tokens:
                best = min(best or (end, start, stop), (end, start, stop))
                break
            start = text.find(stop, start + 1)
    return (best[0], best[2]) if best else None


@given(
    families,
    st.lists(st.sampled_from(["a", "b", "ab", " ", "\n", "你", "👩‍👩‍👧‍👦", "the "]), max_size=25),
    st.data(),
    chunk_sizes,
    st.integers(0, 12),
    st.booleans(),
)
@settings(max_examples=600, deadline=None)
def test_stop_strings_cut_where_a_search_does(
    tokenizer: Tokenizer,
    pieces: list[str],
    data: st.DataObject,
    sizes: list[int],
    min_tokens: int,
    include: bool,
) -> None:
    """B046, B052, B053: text, tokens and stop string as a search over the finished text finds
    them, and after each push nothing is withheld but a beginning of a stop string."""
    ids = tokenizer.encode("".join(pieces)).ids
    detokenizer = Detokenizer(tokenizer)
    by_token = [detokenizer.step(token_id) for token_id in ids]
    text = "".join(by_token)
    owners = [index for index, piece in enumerate(by_token) for _ in piece]
    cuts = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 5))
    stop = st.one_of(
        cuts.map(lambda c: text[c[0] : c[0] + c[1]] or "x"),
        st.text("ab \n你", min_size=1, max_size=4),
    )
    stops = data.draw(st.lists(stop, min_size=1, max_size=4))
    match = first_match(text, owners, stops, min_tokens)

    stream = TextStream(
        tokenizer, (), StopStrings(stops), min_tokens=min_tokens, include_stop=include
    )
    delivered, num_ids = "", 0
    for chunk in chunks_of(ids, sizes):
        delta = stream.push(chunk)
        delivered += delta.text
        num_ids += delta.num_ids
        if delta.stop_string is not None:
            break
        so_far = "".join(by_token[:num_ids])
        withheld = 0 if include else longest_beginning(so_far, stops)
        assert delivered == so_far[: len(so_far) - withheld]

    if match is None:
        assert stream.stop_string is None
        assert num_ids == len(ids)
        assert delivered + stream.finish() == decode(tokenizer, ids)
    else:
        end, stop_string = match
        assert stream.stop_string == stop_string
        assert num_ids == owners[end - 1] + 1
        assert delivered == text[: end if include else end - len(stop_string)]
        assert stream.finish() == ""
        assert stream.push(ids) == ("", 0, stop_string)


@given(families, texts, st.integers(0, 40), st.integers(0, 40), st.lists(st.sampled_from(PIECES)))
@settings(max_examples=300, deadline=None)
def test_a_replayed_stream_goes_on_as_the_undisturbed_one(
    tokenizer: Tokenizer, text: str, prompt_len: int, cut: int, stops: list[str]
) -> None:
    """Resume: what is delivered after k ids, withheld text included, is independent of a replay."""
    ids = tokenizer.encode(text).ids
    prompt, answer = ids[:prompt_len], ids[prompt_len:]
    compiled = StopStrings(stops) if stops else None
    undisturbed = TextStream(tokenizer, prompt, compiled, min_tokens=3)
    replayed = TextStream(tokenizer, prompt, compiled, min_tokens=3)
    for token_id in answer[:cut]:
        undisturbed.push([token_id])
    assert replayed.replay(answer[:cut]) == undisturbed.stop_string
    for token_id in answer[cut:]:
        assert replayed.push([token_id]) == undisturbed.push([token_id])
    assert replayed.finish() == undisturbed.finish()


def test_the_oracle_can_fail() -> None:
    """Decoding token by token, the fault of B055 and B058, is caught by these texts."""
    for tokenizer, text in ((byte_level(), "안녕"), (llama_bpe(), "I am testing")):
        ids = tokenizer.encode(text).ids
        assert "".join(decode(tokenizer, [i]) for i in ids) != decode(tokenizer, ids)
        assert streamed(TextStream(tokenizer), ids, [1]) == decode(tokenizer, ids)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_families_tell_text_and_its_spaces(name: str) -> None:
    tokenizer = FAMILIES[name]()
    text = "The quick  brown fox: 안녕 你 👩‍👩‍👧‍👦"
    assert decode(tokenizer, tokenizer.encode(text).ids) == text
