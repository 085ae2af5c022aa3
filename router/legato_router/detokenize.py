"""From token ids to text: one pure state machine per choice.

What it gives depends on the ids alone, never on how they were cut into messages, so an answer that
moves to another worker or another router goes on exactly where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .stop import StopStrings

NUM_CONTEXT_IDS = 16
"""Prompt ids that tell how the first generated token joins on (its leading space)."""

MAX_PENDING_IDS = 64
"""Ids without text before :class:`Detokenizer` shortens what it decodes again at each step."""

REPLACEMENT = "�"
"""What a decoder shows for bytes that are not, or not yet, a character."""


class TextDelta(NamedTuple):
    """What new ids gave: text that is final, how many of the ids belong to the answer (all, up to
    and including the one that completed a stop string), and that stop string."""

    text: str
    num_ids: int
    stop_string: str | None


class Detokenizer:
    """Text of one token history, as it becomes final; :class:`DecodeStream` does the decoding.

    The pieces that :meth:`step` and :meth:`flush` give, joined, are what decoding prompt and answer
    in one go has behind the prompt's text, byte for byte. A character that the prompt began and the
    answer completes belongs to the answer. One case has no such equal: SentencePiece's byte
    fallback turns a *whole* run of byte tokens into U+FFFD when a later one breaks it; characters
    already given then stand, and the rest of the run is decoded by itself.
    """

    __slots__ = ("_context", "_pending", "_prompt_text", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        """``prompt_ids``: the prompt, or at least its last ``2 * NUM_CONTEXT_IDS`` ids."""
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []
        self._stream = DecodeStream(skip_special_tokens=True)
        self._prompt_text = ""
        context, unfinished = _split_prompt(tokenizer, prompt_ids)
        self._restart(context, unfinished)
        # Stands in front of the first text, unless the answer makes a character of it.
        self._prompt_text = self._decode(unfinished)

    def step(self, token_id: int) -> str:
        """Text that became final with this id; often empty."""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # the decoder took back text already given; it has no class of its own
            if not self._context:
                raise
            return self._restart([], self._pending)
        if text is None:
            return self._shorten() if len(self._pending) >= MAX_PENDING_IDS else ""
        # What DecodeStream keeps too: the ids of the last text, and those since.
        self._context, self._pending = self._pending, []
        return self._behind_prompt(text) if self._prompt_text else text

    def flush(self) -> str:
        """Text of what is still unfinished, as a one-shot decode shows it. Ends the stream."""
        text = self._text_after(self._context, self._pending)
        self._pending = []
        return self._behind_prompt(text)

    def _restart(self, context: list[int], ids: Sequence[int]) -> str:
        self._context = context
        self._pending = []
        self._stream = DecodeStream(ids=context, skip_special_tokens=True)
        return "".join([self.step(token_id) for token_id in ids])

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _text_after(self, context: list[int], ids: list[int]) -> str:
        before = self._decode(context)
        both = self._decode(context + ids)
        return both[len(before) :] if both.startswith(before) else self._decode(ids)

    def _behind_prompt(self, text: str) -> str:
        if text:
            text = text.removeprefix(self._prompt_text)
            self._prompt_text = ""
        return text

    def _shorten(self) -> str:
        """Gives the text of many pending ids as it stands, so that a stream of broken bytes or
        special tokens costs each step a bounded time. The last ids are kept when text without them
        is shorter: they may begin a character, which has at most 4 bytes."""
        ends = range(len(self._pending), len(self._pending) - 4, -1)
        texts = [self._text_after(self._context, self._pending[:end]) for end in ends]
        text, end = min(zip(texts, ends, strict=True), key=lambda cut: len(cut[0]))
        kept = self._pending[end:]
        return self._behind_prompt(text) + self._restart([] if text else self._context, kept)


class TextStream:
    """Text of one choice, with its stop strings. Not thread-safe; one owner.

    ``min_tokens``: a stop string counts only if its last character comes from a token with index
    (from 0) of at least ``min_tokens``; it may have begun before. Text is withheld only while it is
    a true prefix of a stop string; with ``include_stop`` (the stop string stays in the text)
    nothing has to be withheld.
    """

    __slots__ = (
        "_detokenizer",
        "_held",
        "_include_stop",
        "_min_tokens",
        "_num_ids",
        "_state",
        "_stops",
        "stop_string",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        stops: StopStrings | None = None,
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._stops = stops
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._state = StopStrings.START
        self._held = ""
        self._num_ids = 0
        self.stop_string: str | None = None
        """The stop string that ended this choice."""

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Takes the next ids of the answer. Those behind a stop string are not part of it, in this
        call and in later ones."""
        if self.stop_string is not None:
            return TextDelta("", 0, self.stop_string)
        step = self._detokenizer.step
        if self._stops is None:
            text = step(ids[0]) if len(ids) == 1 else "".join([step(i) for i in ids])
            return TextDelta(text, len(ids), None)
        pieces = []
        for index, token_id in enumerate(ids):
            text = step(token_id)
            if text:
                text, stop = self._pass(text, self._stops)
                pieces.append(text)
                if stop is not None:
                    self.stop_string = stop
                    return TextDelta("".join(pieces), index + 1, stop)
            self._num_ids += 1
        return TextDelta("".join(pieces), len(ids), None)

    def replay(self, ids: Sequence[int]) -> str | None:
        """Takes ids whose text was delivered before (by another router, say), and gives no text:
        the state, withheld text included, is then that of the undisturbed stream. Returns the stop
        string if the answer had ended within these ids."""
        return self.push(ids).stop_string

    def finish(self) -> str:
        """The text still withheld, for every end but a stop string (then it is empty)."""
        if self.stop_string is not None:
            return ""
        text = self._held + self._detokenizer.flush()
        self._held = ""
        return text

    def _pass(self, text: str, stops: StopStrings) -> tuple[str, str | None]:
        """The part of withheld and new text that is final, and the stop string that ends it."""
        armed = self._num_ids >= self._min_tokens
        self._state, end = stops.scan(self._state, text, armed)
        if self._held:
            end = end and end + len(self._held)
            text = self._held + text
        stop = stops.match[self._state] if end else None
        if stop is not None:
            return text[: end if self._include_stop else end - len(stop)], stop
        final = len(text) - (0 if self._include_stop else stops.held[self._state])
        self._held = text[final:]
        return text[:final], None


def _split_prompt(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """The end of a prompt, as ids whose text is finished, and ids behind them whose is not.

    Four beginnings are tried, since one that lies within a character of byte tokens makes the whole
    run of them unreadable.
    """
    for end in range(len(ids), max(len(ids) - NUM_CONTEXT_IDS, 0), -1):
        begin = max(end - NUM_CONTEXT_IDS, 0)
        for start in range(begin, min(begin + 4, end)):
            context = list(ids[start:end])
            if not tokenizer.decode(context, skip_special_tokens=True).endswith(REPLACEMENT):
                return context, list(ids[end:])
    return [], list(ids[-NUM_CONTEXT_IDS:])
