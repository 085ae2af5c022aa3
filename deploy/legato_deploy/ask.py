"""Prompts from a terminal: one answer, a conversation, and what a router serves."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import Any

from legato.client import AnswerStream, Client, LegatoError
from rich.console import Console
from rich.table import Table


async def ask(address: str, prompt: str, fields: dict[str, Any], *, raw: bool, stats: bool) -> None:
    """Prints an answer as it comes, and its timings on standard error."""
    async with Client(address) as client:
        if raw:
            stream = client.stream(prompt, **fields)
        else:
            stream = client.stream(chat=[{"role": "user", "content": prompt}], **fields)
        started = time.monotonic()
        await print_stream(stream)
        if stats:
            print(_stats(stream, time.monotonic() - started), file=sys.stderr)


async def print_stream(stream: AnswerStream) -> str:
    """Writes each piece of text at once; returns the whole."""
    pieces = []
    async for delta in stream:
        pieces.append(delta.text)
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return "".join(pieces)


def _stats(stream: AnswerStream, elapsed_s: float) -> str:
    finished = stream.finished
    if finished is None:
        return ""
    usage, timings = finished.usage, finished.timings
    decode_s = max(1e-9, elapsed_s - timings.ttft_s)
    rate = max(0, usage.completion_tokens - 1) / decode_s
    return (
        f"[{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{usage.completion_tokens} generated; first after {timings.ttft_s * 1e3:.0f} ms, "
        f"then {rate:.0f} tokens/s]"
    )


def converse(address: str, model: str, system: str, *, temperature: float, max_tokens: int) -> None:
    """A conversation on the terminal, until Ctrl-D or /quit."""
    messages = [{"role": "system", "content": system}] if system else []
    console = Console(stderr=True)
    console.print(f"Connected to {address}. Ctrl-C cuts an answer short; Ctrl-D or /quit leaves.")
    with asyncio.Runner() as runner:
        while True:
            try:
                line = input("you> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if line == "/quit":
                return
            if not line:
                continue
            messages.append({"role": "user", "content": line})
            fields: dict[str, Any] = {
                "model": model,
                "temperature": temperature,
                "max_tokens": max_tokens,
                "session": f"chat-{id(messages)}",
            }
            try:
                text = runner.run(_turn(address, messages, fields))
            except LegatoError as error:
                console.print(f"[{error}]", markup=False)
                messages.pop()
            except KeyboardInterrupt:
                print(" [cut]")
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": text})


async def _turn(address: str, messages: list[dict[str, str]], fields: dict[str, Any]) -> str:
    async with Client(address) as client:
        return await print_stream(client.stream(chat=messages, **fields))


async def list_served(address: str) -> None:
    """Prints the models of a router."""
    table = Table(box=None, pad_edge=False, title=f"served at {address}", title_justify="left")
    for title in ("model", "workers", "max tokens", "vocabulary", "chat"):
        table.add_column(title)
    async with Client(address) as client:
        for model in await client.list_models():
            table.add_row(
                model.name,
                str(model.workers),
                str(model.max_model_len),
                str(model.vocab_size),
                "yes" if model.has_chat_template else "no",
            )
    with contextlib.suppress(BrokenPipeError):
        Console().print(table)
