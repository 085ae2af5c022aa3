"""Tokenizing: what the model's files say, off the event loop, within bounds (B083)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from legato.errors import LegatoError, Reason
from legato_deploy.store import ModelStore, default_root
from legato_router.chat import ChatTemplate
from legato_router.detokenize import TextStream
from legato_router.tokenizer import ModelTokenizer, TokenizerPool
from legato_router.validated import ChatPrompt, IdsPrompt, Message, TextPrompt
from tokenizers import Tokenizer

from tests.small_tokenizers import byte_level, ids_of, llama_bpe

SENTENCE = "The quick brown fox jumps over the lazy dog 0123456789. "
PROBE_LIMIT_S = 0.1


def copy_of(tokenizer: Tokenizer) -> Tokenizer:
    return Tokenizer.from_str(tokenizer.to_str())


def pool_of(
    max_model_len: int = 1000,
    *,
    template: ChatTemplate | None = None,
    num_threads: int = 2,
    max_pending: int = 256,
) -> TokenizerPool:
    tokenizer = ModelTokenizer(copy_of(llama_bpe()))
    return TokenizerPool(
        tokenizer,
        template,
        max_model_len=max_model_len,
        num_threads=num_threads,
        max_pending=max_pending,
    )


@asynccontextmanager
async def probe() -> AsyncIterator[list[float]]:
    """Delays of a task that wants to run every millisecond, as a health probe would."""
    delays: list[float] = []

    async def tick() -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            delays.append(time.perf_counter() - due)

    task = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    try:
        yield delays
        await asyncio.sleep(0.01)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_special_tokens_are_added_once_and_as_the_tokenizer_says() -> None:
    tokenizer = ModelTokenizer(copy_of(llama_bpe()))
    [bos] = ids_of(tokenizer.backend, "<s>")
    ids = tokenizer.encode("Hello")
    assert ids[0] == bos
    assert tokenizer.encode("Hello", add_special_tokens=False) == ids[1:]
    assert tokenizer.encode("<s>Hello", add_special_tokens=False).count(bos) == 1


def test_ids_are_those_of_a_plain_encode() -> None:
    """The batch call, which releases the interpreter's lock, must not change a thing."""
    tokenizer = ModelTokenizer(copy_of(llama_bpe()))
    for text in (SENTENCE, "안녕 你 👩‍👩‍👧‍👦", "", " ", "\x00", "<|im_start|>user\n"):
        assert tokenizer.encode(text) == tokenizer.backend.encode(text).ids


def test_a_files_training_length_and_padding_are_not_used(tmp_path: Path) -> None:
    stored = copy_of(llama_bpe())
    full = stored.encode(SENTENCE * 5).ids
    stored.enable_truncation(8)
    stored.enable_padding(length=4096)
    stored.save(str(tmp_path / "tokenizer.json"))
    assert ModelTokenizer.load(tmp_path).encode(SENTENCE * 5) == full


async def test_a_prompt_of_ids_is_used_as_it_is() -> None:
    pool = pool_of()
    assert await pool.encode(IdsPrompt((5, 6))) == (5, 6)
    pool.close()


async def test_text_and_chat_become_ids() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", {"bos_token": "<s>"}
    )
    pool = pool_of(template=template)
    text = await pool.encode(TextPrompt("Hello"))
    assert text == tuple(llama_bpe().encode("Hello").ids)
    # The template wrote the beginning-of-text token: it is not added a second time.
    assert await pool.encode(ChatPrompt((Message("user", "Hello"),))) == text
    pool.close()


async def test_a_chat_for_a_model_without_template_is_refused() -> None:
    pool = pool_of()
    with pytest.raises(LegatoError) as caught:
        await pool.encode(ChatPrompt((Message("user", "x"),)))
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_ARGUMENT, "chat")
    pool.close()


async def test_texts_above_the_limit_are_refused_and_those_at_it_are_not() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {})
    pool = pool_of(100, template=template)
    assert await pool.encode(TextPrompt("é" * 800))
    for prompt, field in (
        (TextPrompt("é" * 800 + "x"), "text"),
        (ChatPrompt((Message("user", "x" * 1601),)), "chat"),
        (ChatPrompt((Message("user", "x" * 1599),)), "chat"),  # with the template's own part
    ):
        with pytest.raises(LegatoError) as caught:
            await pool.encode(prompt)
        assert (caught.value.reason, caught.value.field) == (Reason.INVALID_ARGUMENT, field)
        assert caught.value.metadata["limit"] == "1600"
    assert await pool.encode(ChatPrompt((Message("user", "x" * 1598),)))
    pool.close()


async def test_b083_a_huge_text_is_refused_without_stalling_the_loop() -> None:
    pool = pool_of(8192)
    huge = "long text " * (27 * 100_000)
    assert len(huge) == 27_000_000
    async with probe() as delays:
        for _ in range(20):
            with pytest.raises(LegatoError) as caught:
                await pool.encode(TextPrompt(huge))
            assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert max(delays) < PROBE_LIMIT_S
    pool.close()


async def test_b083_the_largest_texts_are_tokenized_off_the_loop() -> None:
    """More texts than threads, each the most that a model of 65,536 tokens takes."""
    pool = pool_of(1 << 16)
    text = (SENTENCE * (1 + (1 << 20) // len(SENTENCE)))[: 1 << 20]
    async with probe() as delays:
        start = time.perf_counter()
        results = await asyncio.gather(*(pool.encode(TextPrompt(text)) for _ in range(4)))
        elapsed = time.perf_counter() - start
    assert len(set(results)) == 1
    assert len(results[0]) > 100_000
    assert elapsed > PROBE_LIMIT_S  # else the probe would prove nothing
    assert len(delays) > 10
    assert max(delays) < PROBE_LIMIT_S
    pool.close()


async def test_waiting_prompts_are_bounded_and_a_cancelled_one_frees_its_place() -> None:
    pool = pool_of(1 << 16, num_threads=1, max_pending=2)
    long = TextPrompt(SENTENCE * 15_000)
    running = asyncio.create_task(pool.encode(long))
    waiting = asyncio.create_task(pool.encode(long))
    await asyncio.sleep(0)
    with pytest.raises(LegatoError) as caught:
        await pool.encode(TextPrompt("short"))
    assert caught.value.reason is Reason.QUEUE_FULL
    assert caught.value.retry_after_s is not None
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await pool.encode(TextPrompt("Hello")) == tuple(llama_bpe().encode("Hello").ids)
    assert len(await running) > 1000
    # All places are free again.
    both = await asyncio.gather(*(pool.encode(TextPrompt("Hello")) for _ in range(2)))
    assert len(both) == 2
    pool.close()


async def test_a_failed_prompt_frees_its_place() -> None:
    pool = pool_of(template=ChatTemplate("{{ raise_exception('no') }}", {}), max_pending=1)
    for _ in range(3):
        with pytest.raises(LegatoError) as caught:
            await pool.encode(ChatPrompt((Message("user", "x"),)))
        assert caught.value.field == "chat"
    assert await pool.encode(TextPrompt("Hello"))
    pool.close()


async def test_closing_cancels_prompts_that_wait() -> None:
    pool = pool_of(1 << 16, num_threads=1)
    tasks = [asyncio.create_task(pool.encode(TextPrompt(SENTENCE * 10_000))) for _ in range(3)]
    await asyncio.sleep(0.02)
    pool.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], tuple)
    assert isinstance(results[2], asyncio.CancelledError)


def test_decoding_goes_on_while_other_threads_encode() -> None:
    """One tokenizer serves both: a stream's step must not wait for a long text."""
    tokenizer = ModelTokenizer(copy_of(byte_level()))
    stream = TextStream(tokenizer.backend)
    ids = tokenizer.encode(SENTENCE)
    worst = 0.0
    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(tokenizer.encode, SENTENCE * 15_000)
        num_steps = 0
        while not job.done():
            start = time.perf_counter()
            stream.push(ids)
            worst = max(worst, time.perf_counter() - start)
            num_steps += 1
            time.sleep(0.0005)
    assert num_steps > 20
    assert worst < PROBE_LIMIT_S


def test_the_router_leaves_torch_out(tmp_path: Path) -> None:
    """Importing these modules and rendering a chat, in a process of its own."""
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    program = f"""
import sys
from pathlib import Path
import legato_router.detokenize, legato_router.resume_token, legato_router.stop
import legato_router.tokenizer, legato_router.validate
from legato_router.chat import ChatTemplate
from legato_router.validated import ChatPrompt, Message
assert "transformers" not in sys.modules
template = ChatTemplate.load(Path({str(tmp_path)!r}))
print(template.render(ChatPrompt((Message("user", "rendered"),))))
print("torch" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["rendered", "False"], done.stderr


@pytest.mark.model
def test_smollm2_splits_numbers_into_digits() -> None:
    """Its conversion once lost the digit splitting."""
    stored = ModelStore(default_root()).get("smollm2-135m-instruct")
    tokenizer = ModelTokenizer.load(Path(stored.path))
    ids = tokenizer.encode("12345")
    assert [tokenizer.backend.decode([i]) for i in ids] == list("12345")
