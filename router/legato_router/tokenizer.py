"""Text to token ids, off the event loop.

A :class:`ModelTokenizer` is plain and synchronous; a :class:`TokenizerPool` runs it in a few
threads, behind a bound on the size of a text and on the number of texts that wait.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from legato.errors import LegatoError, Reason, invalid
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece

from .chat import ChatTemplate
from .validated import MAX_BYTES_PER_TOKEN, ChatPrompt, IdsPrompt, Prompt, TextPrompt

RETRY_AFTER_S = 1.0


class ModelTokenizer:
    """The tokenizer of a model, as its tokenizer.json describes it. Any thread.

    ``backend`` is what :class:`legato_router.detokenize.TextStream` decodes with.
    """

    def __init__(self, backend: Tokenizer) -> None:
        """Takes ``backend`` over. Some models' files cut or pad texts to a training length, or tidy
        decoded text (which would change what was already sent): both are switched off."""
        backend.no_truncation()
        backend.no_padding()
        if isinstance(backend.decoder, WordPiece):
            backend.decoder = WordPiece(backend.decoder.prefix, cleanup=False)
        self.backend = backend

    @classmethod
    def load(cls, model_dir: Path) -> ModelTokenizer:
        return cls(Tokenizer.from_file(str(model_dir / "tokenizer.json")))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. ``add_special_tokens``: as the model does by default (a beginning-of-text
        id, say); False for rendered chats, which already hold them."""
        # The batch call releases the interpreter's lock while it works; ``encode`` does not.
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


class TokenizerPool:
    """Tokenizes the prompts of one model in threads of its own, for one event loop.

    Owns its threads until :meth:`close`. At most ``max_pending`` prompts are being worked on or
    wait; a caller that is cancelled frees its place, at once if its prompt still waited.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        chat_template: ChatTemplate | None,
        *,
        max_model_len: int,
        num_threads: int = 2,
        max_pending: int = 256,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._max_text_bytes = max_model_len * MAX_BYTES_PER_TOKEN
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self._places = threading.BoundedSemaphore(max_pending)

    async def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The ids of a prompt.

        Raises INVALID_ARGUMENT (field ``text`` or ``chat``) for one that is too long or that the
        chat template refuses, before it takes a place; QUEUE_FULL when all places are taken.
        """
        match prompt:
            case IdsPrompt():
                return prompt.ids
            case TextPrompt():
                self._check_size("text", prompt.text)
            case ChatPrompt():
                if self._chat_template is None:
                    raise invalid("chat", "the model has no chat template; send text or token_ids")
                self._check_size("chat", *(message.content for message in prompt.messages))
        if not self._places.acquire(blocking=False):
            raise LegatoError(
                Reason.QUEUE_FULL, "too many prompts to tokenize", retry_after_s=RETRY_AFTER_S
            )
        job = self._threads.submit(self._encode, prompt)
        job.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Ends the threads. Prompts that wait are cancelled; those in work are finished unheard."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(self, prompt: TextPrompt | ChatPrompt) -> tuple[int, ...]:
        if isinstance(prompt, TextPrompt):
            return tuple(self._tokenizer.encode(prompt.text))
        assert self._chat_template is not None
        rendered = self._chat_template.render(prompt)
        self._check_size("chat", rendered)  # the template adds its own part
        return tuple(self._tokenizer.encode(rendered, add_special_tokens=False))

    def _check_size(self, field: str, *texts: str) -> None:
        # A character takes at least a byte: a huge text is refused without being encoded.
        limit = self._max_text_bytes
        size = sum(map(len, texts))
        if size <= limit:
            size = sum(len(text.encode()) for text in texts)
        if not size <= limit:
            raise invalid(
                field, f"at most {limit} bytes of text, not {size}", limit=limit, observed=size
            )
