"""Chat templates: messages to the text that a model was trained on.

Rendering is transformers' own (sandboxed Jinja), so a template does here what it does there. Only
that function is imported, and only for a model that has a template: it brings no torch along.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from legato.errors import LegatoError, Reason, invalid

from .validated import ChatPrompt

MAX_CAUSE_CHARS = 200
"""Of a template's message, which may quote the chat, while an error travels in small trailers."""


class ChatTemplate:
    """A model's chat template and the special tokens that it may name. Immutable; any thread."""

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render = render_jinja_template
        self._template = template
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate | None:
        """The template in a model folder; None if it has none. Takes about a second, for the
        import."""
        config = _read_json(model_dir / "tokenizer_config.json")
        template = _template(model_dir, config)
        if template is None:
            return None
        # The tokenizer's configuration overrides the older file of special tokens.
        tokens = _read_json(model_dir / "special_tokens_map.json") | config
        return cls(template, _special_tokens(tokens))

    def render(self, prompt: ChatPrompt) -> str:
        """The text of a chat, special tokens written out: encode it without adding them again.

        With ``skip_generation_prompt`` the assistant's turn is not opened, and a last message of
        the assistant is left open for the model to go on with. Raises INVALID_ARGUMENT (field
        ``chat``) when the template refuses the messages.
        """
        messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
        continues = prompt.skip_generation_prompt and messages[-1]["role"] == "assistant"
        try:
            rendered, _ = self._render(
                conversations=[messages],
                chat_template=self._template,
                add_generation_prompt=not prompt.skip_generation_prompt,
                continue_final_message=continues,
                **self._special_tokens,
            )
        except TemplateSyntaxError as error:
            raise LegatoError(
                Reason.INTERNAL, f"the model's chat template is broken: {error}"
            ) from error
        except Exception as error:  # a template is a program: it can fail in any way
            cause = str(error)[:MAX_CAUSE_CHARS]
            raise invalid(
                "chat", f"the model's chat template refuses these messages: {cause}"
            ) from error
        text: str = rendered[0]
        return text


def _template(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, written as a string or as a described token."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
