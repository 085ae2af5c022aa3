"""Detokenizing and stop strings, by the faults that users met (section E of the fault list)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from legato_deploy.store import ModelStore, default_root
from legato_router.detokenize import TextStream
from legato_router.stop import StopStrings
from legato_router.tokenizer import ModelTokenizer
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from tests.small_tokenizers import (
    FAMILIES,
    byte_level,
    fallback_ids,
    ids_of,
    llama_bpe,
    metaspace_unigram,
)

TEXTS = [
    "한국어 문장을 스트리밍하면 글자가 깨지지 않아야 합니다.",  # B055: 5-13 syllables were lost
    "👩‍👩‍👧‍👦 a family, 🏳️‍🌈 a flag, 👍🏽 a skin tone",
    "𠀀𠀁 and 世界 and e\u0301",
    " leading x",
    "I am testing",
    "def f():\n    .x\n\n\n        return 12345\t# done",
    "a � is a character too ���",
]


def by_one(stream: TextStream, ids: Sequence[int]) -> list[str]:
    return [stream.push([token_id]).text for token_id in ids]


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_b055_characters_split_over_tokens_arrive_whole(name: str, text: str, size: int) -> None:
    tokenizer = FAMILIES[name]()
    ids = tokenizer.encode(text).ids
    stream = TextStream(tokenizer)
    pieces = [stream.push(ids[i : i + size]).text for i in range(0, len(ids), size)]
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids, skip_special_tokens=True)


def test_b055_an_unfinished_character_at_the_end_is_shown_as_one_shot_decode_does() -> None:
    for tokenizer in (byte_level(), llama_bpe()):
        ids = tokenizer.encode("ab 你").ids[:-1]
        stream = TextStream(tokenizer)
        assert "".join(by_one(stream, ids)) == "ab "
        flushed = stream.finish()
        assert set(flushed) == {"�"}
        assert "ab " + flushed == tokenizer.decode(ids)
        assert stream.finish() == ""


def test_b056_nothing_is_sent_twice_inside_a_recovery_run() -> None:
    """The reported run: A, then 世 with half of a character, then letters."""
    tokenizer = llama_bpe()
    world, half = "世".encode(), "界".encode()[:2]
    ids = [
        *ids_of(tokenizer, "A"),
        *fallback_ids(tokenizer, world + half),
        *ids_of(tokenizer, "b", "c", "d"),
    ]
    stream = TextStream(tokenizer)
    assert by_one(stream, ids) == ["A", "", "", "世", "", "", "��b", "c", "d"]
    assert stream.finish() == ""


def test_b058_a_leading_space_is_trimmed_at_the_start_of_a_text_only() -> None:
    for tokenizer in (llama_bpe(), metaspace_unigram()):
        answer = ids_of(tokenizer, "▁testing", "▁the")
        assert by_one(TextStream(tokenizer), answer) == ["testing", " the"]
        prompt = tokenizer.encode("I am").ids
        assert by_one(TextStream(tokenizer, prompt), answer) == [" testing", " the"]


def test_b058_special_tokens_at_the_prompts_end_do_not_hide_its_text() -> None:
    tokenizer = llama_bpe()
    prompt = [*tokenizer.encode("I am").ids, *ids_of(tokenizer, "<|im_end|>", "<|im_start|>")]
    assert by_one(TextStream(tokenizer, prompt), ids_of(tokenizer, "▁testing")) == [" testing"]


def test_b059_text_is_not_tidied_after_it_was_sent() -> None:
    """Four spaces, then a full stop; and a decoder that would pull punctuation to the left."""
    for tokenizer in (byte_level(), llama_bpe()):
        ids = tokenizer.encode("x    .").ids
        assert "".join(by_one(TextStream(tokenizer), ids)) == "x    ."

    words = Tokenizer(models.WordLevel({"do": 0, "not": 1, "n't": 2, ".": 3, "'s": 4}, "."))
    words.decoder = decoders.WordPiece(cleanup=True)
    assert words.decode([0, 3, 4]) == "do.'s"
    tokenizer = ModelTokenizer(words).backend
    assert by_one(TextStream(tokenizer), [0, 2, 3, 1, 4]) == ["do", " n't", " .", " not", " 's"]


def test_a_prompt_that_ends_within_a_character_is_not_repeated() -> None:
    """DecodeStream, begun with such a prompt, would give the prompt's text again."""
    for tokenizer in (byte_level(), llama_bpe()):
        ids = tokenizer.encode("ab 你好").ids
        for split in range(1, len(ids)):
            stream = TextStream(tokenizer, ids[:split])
            text = "".join(by_one(stream, ids[split:])) + stream.finish()
            assert "ab 你好".endswith(text), (split, text)
            assert "�" not in text
    # One that ends with U+FFFD itself has ended.
    prompt, answer = byte_level().encode("a�").ids, byte_level().encode("b c").ids
    assert "".join(by_one(TextStream(byte_level(), prompt), answer)) == "b c"


def test_b055_a_prompt_of_many_byte_tokens_gives_readable_context() -> None:
    """A context that began within a character would make the whole run unreadable."""
    tokenizer = llama_bpe()
    ids = tokenizer.encode("안녕하세요 안녕하세요반갑습니다").ids
    for split in range(20, len(ids)):
        stream = TextStream(tokenizer, ids[:split])
        text = "".join(by_one(stream, ids[split:])) + stream.finish()
        assert "�" not in text
        assert "안녕하세요 안녕하세요반갑습니다".endswith(text)


def test_ids_that_the_tokenizer_lacks_have_no_text() -> None:
    tokenizer = byte_level()
    hello = tokenizer.encode("Hello").ids
    ids = [*hello, 10**6, 2**32 - 1, *hello]
    assert "".join(by_one(TextStream(tokenizer), ids)) == "HelloHello"


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_ids_without_text_cost_each_step_a_bounded_time(name: str) -> None:
    """Broken bytes, U+FFFD and special tokens without end: decoding all of them again at each step
    takes seconds for these lengths."""
    tokenizer = FAMILIES[name]()
    for filler in (
        tokenizer.encode("你").ids[-1:],
        ids_of(tokenizer, "<|im_end|>"),
        tokenizer.encode("x�").ids[-3:],
    ):
        stream = TextStream(tokenizer)
        start = time.perf_counter()
        for _ in range(20_000 // len(filler)):
            stream.push(filler)
        assert time.perf_counter() - start < 2


# Stop strings ------------------------------------------------------------------------------------


def stopped(
    text: str, stops: Sequence[str], *, min_tokens: int = 0, include_stop: bool = False
) -> tuple[list[str], TextStream]:
    """The deltas of ``text`` sent one character a token, and the stream behind them."""
    tokenizer = byte_level()
    ids = [tokenizer.encode(char).ids[0] for char in text]
    stream = TextStream(
        tokenizer, (), StopStrings(stops), min_tokens=min_tokens, include_stop=include_stop
    )
    return by_one(stream, ids), stream


def test_a_stop_string_ends_the_answer_before_it() -> None:
    deltas, stream = stopped("hello STOP more", ["STOP"])
    assert "".join(deltas) == "hello "
    assert stream.stop_string == "STOP"
    assert stream.finish() == ""


def test_the_match_names_its_token_and_later_ids_are_not_of_the_answer() -> None:
    """B061: usage counts up to and including the token that completed the match."""
    tokenizer = byte_level()
    ids = [tokenizer.encode(char).ids[0] for char in "abENDcd"]
    stream = TextStream(tokenizer, (), StopStrings(["END"]))
    assert stream.push(ids[:3]) == ("ab", 3, None)
    assert stream.push(ids[3:]) == ("", 2, "END")
    assert stream.push(ids[:2]) == ("", 0, "END")


def test_a_stop_string_inside_one_token_cuts_that_token() -> None:
    tokenizer = byte_level()
    [token] = tokenizer.encode("Hello").ids
    stream = TextStream(tokenizer, (), StopStrings(["ll"]))
    assert stream.push([token, token]) == ("He", 1, "ll")


def test_the_stop_string_stays_if_asked_and_then_nothing_is_withheld() -> None:
    deltas, stream = stopped("ab STOP x", ["STOP"], include_stop=True)
    assert deltas == ["a", "b", " ", "S", "T", "O", "P", "", ""]
    assert stream.stop_string == "STOP"


def test_of_several_the_one_complete_first_counts_and_the_longest_of_those() -> None:
    for stops, text, left in (
        (["abcd", "bc"], "xabcd", "xa"),
        (["bc", "abc"], "xabc", "x"),
        (["c", "bc", "abc"], "xabc", "x"),
        (["aab"], "aaab", "a"),
        (["abab", "babb"], "ababb", ""),
    ):
        deltas, stream = stopped(text, stops)
        assert ("".join(deltas), stream.stop_string is None) == (left, False), (stops, text)


def test_b053_an_unrelated_stop_string_delays_nothing() -> None:
    text = "nothing of this looks like it" * 3
    deltas, _ = stopped(text, ["Q" * 40])
    assert deltas == list(text)


def test_b053_only_a_true_beginning_is_withheld_and_no_longer_than_it_is_one() -> None:
    deltas, stream = stopped("a<b</c</s", ["</s>", "</sample>"])
    assert deltas == ["a", "", "<b", "", "", "</c", "", "", ""]
    assert stream.finish() == "</s"


@pytest.mark.parametrize("cause", ["end of sequence", "length", "cancel"])
def test_b052_withheld_text_comes_at_every_end_but_a_match(cause: str) -> None:
    tokenizer = byte_level()
    ids = [tokenizer.encode(char).ids[0] for char in "so \n\nHum"]
    if cause == "end of sequence":
        ids += ids_of(tokenizer, "<|im_end|>")
    stream = TextStream(tokenizer, (), StopStrings(["\n\nHuman:"]))
    assert "".join(by_one(stream, ids)) == "so "
    assert stream.finish() == "\n\nHum"
    assert stream.finish() == ""


def test_b052_withheld_text_and_an_unfinished_character_come_in_order() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("<").ids, *tokenizer.encode("你").ids[:2]]
    stream = TextStream(tokenizer, (), StopStrings(["</s>"]))
    assert by_one(stream, ids) == ["", "", ""]
    assert stream.finish() == "<�"


def test_b046_no_stop_string_counts_before_min_tokens() -> None:
    """The reported case: a newline as stop string, 20 tokens at least."""
    text = "a\nb\n" * 5 + "cd\ne"
    deltas, stream = stopped(text, ["\n"], min_tokens=20)
    assert "".join(deltas) == "a\nb\n" * 5 + "cd"
    assert stream.stop_string == "\n"


@pytest.mark.parametrize(("min_tokens", "matches"), [(0, True), (4, True), (5, False)])
def test_b046_the_token_of_the_last_character_decides(min_tokens: int, matches: bool) -> None:
    """ "END" is complete with the token of index 4; the beginning may lie before min_tokens."""
    deltas, stream = stopped("abENDcd", ["END"], min_tokens=min_tokens)
    assert (stream.stop_string == "END") is matches
    assert "".join(deltas) == ("ab" if matches else "abENDcd")


def test_b046_a_match_that_did_not_count_is_not_withheld() -> None:
    deltas, stream = stopped("ENDENx", ["END"], min_tokens=5)
    assert deltas == ["", "", "END", "", "", "ENx"]
    assert stream.stop_string is None


def test_a_stop_string_in_a_characters_bytes_or_across_messages() -> None:
    tokenizer = llama_bpe()
    ids = tokenizer.encode("ok 你好世界").ids
    for size in (1, 2, 5, 100):
        stream = TextStream(tokenizer, (), StopStrings(["好世"]))
        text = "".join(stream.push(ids[i : i + size]).text for i in range(0, len(ids), size))
        assert (text, stream.stop_string) == ("ok 你", "好世")


def test_replaying_a_finished_answer_tells_its_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("ab END").ids
    stream = TextStream(tokenizer, (), StopStrings(["END"]))
    assert stream.replay(ids) == "END"
    assert stream.push(ids) == ("", 0, "END")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_the_largest_allowed_set_of_stop_strings_is_compiled_and_found() -> None:
    stops = [chr(ord("a") + k) * 255 + "!" for k in range(16)]
    deltas, stream = stopped("x" + "b" * 300 + "!", stops)
    assert stream.stop_string == stops[1]
    assert "".join(deltas) == "x" + "b" * 45


def test_the_cost_of_a_token_is_a_few_microseconds() -> None:
    """At most 3 us a token on top of DecodeStream's own (0.5 us without stop strings and 1 us with
    some, where this was written): the best of several runs, since the machine has other work."""
    tokenizer = byte_level()
    ids = tokenizer.encode("Hello world! I am testing the stream, 안녕 12345.\n" * 60).ids

    def raw() -> None:
        stream = DecodeStream(skip_special_tokens=True)
        for token_id in ids:
            stream.step(tokenizer, token_id)

    def ours(stops: StopStrings | None) -> None:
        push = TextStream(tokenizer, (), stops).push
        for token_id in ids:
            push([token_id])

    def best_us(*args: StopStrings | None) -> float:
        durations = []
        for _ in range(15):
            start = time.perf_counter()
            ours(*args) if args else raw()
            durations.append(time.perf_counter() - start)
        return min(durations) / len(ids) * 1e6

    base = best_us()
    assert best_us(None) - base < 3
    assert best_us(StopStrings(["\n\n", "Human:", "<|im_end|>", "###"])) - base < 3


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_streams_what_it_decodes(text: str) -> None:
    tokenizer = ModelTokenizer.load(
        Path(ModelStore(default_root()).get("smollm2-135m-instruct").path)
    )
    ids = tokenizer.encode(text)
    for split in range(len(ids)):
        stream = TextStream(tokenizer.backend, ids[:split])
        answer = "".join(by_one(stream, ids[split:])) + stream.finish()
        assert text.endswith(answer)
        if split == 0:
            assert answer == text
