"""From what a row calls its prompt to tokens: texts are encoded, messages laid out by a chat template, ids taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from meshwright.profiles.errors import BadInput


class Encoder:
    """Encodes prompts with the tokenizer of a directory, or of a tokenizer.json alone, which has no chat template."""

    def __init__(self, tokenizer: Tokenizer, directory: Path, *, chat: bool) -> None:
        """With `chat` a text is a user's message."""
        self._tokenizer, self._directory, self._chat = tokenizer, directory, chat
        self.num_ids = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, prompt: Any, place: str) -> tuple[int, ...]:
        """The tokens of a text, of messages, or of token ids, which stay as they are.

        Raises BadInput, beginning with `place`, for anything else, and for a prompt without tokens.
        """
        if isinstance(prompt, str):
            tokens = (
                self._of_messages([{"role": "user", "content": prompt}], place)
                if self._chat
                else self._ids(prompt, place)
            )
        elif _are_messages(prompt):
            tokens = self._of_messages(prompt, place)
        elif _are_ids(prompt):
            tokens = self._known_ids(prompt, place)
        else:
            raise BadInput(
                f"{place} has a prompt that is neither a text nor messages with role and content nor token ids; give "
                "one of these."
            )
        if not tokens:
            raise BadInput(f"{place} has no tokens; give it a text, or take the row out.")
        return tokens

    def _ids(self, text: str, place: str, *, special: bool = True) -> tuple[int, ...]:
        """What the tokenizer makes of a text, with its special tokens around it or without."""
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=special).ids)
        except Exception as error:
            raise BadInput(f"{place} cannot be encoded: the tokenizer says {error}; give it another one.") from None

    def _known_ids(self, ids: Sequence[int], place: str) -> tuple[int, ...]:
        strange = next((token for token in ids if not 0 <= token < self.num_ids), None)
        if strange is not None:
            raise BadInput(
                f"{place} has the token id {strange}, and the tokenizer has ids from 0 to {self.num_ids - 1}."
            )
        return tuple(ids)

    def _of_messages(self, messages: Sequence[Mapping[str, Any]], place: str) -> tuple[int, ...]:
        """As the template has them, special tokens included, with the beginning of an answer."""
        if messages[-1]["role"] == "assistant":
            raise BadInput(f"{place} ends with a message of the assistant, which is to answer; take that message out.")
        from jinja2 import TemplateError  # noqa: PLC0415 - with the first messages

        told = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            text = self._template.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise BadInput(f"{place}: the chat template refuses the messages: {error}") from None
        return self._ids(text, place, special=False)

    @cached_property
    def _template(self) -> Any:
        """What applies the chat template; templates run in the sandbox of transformers."""
        from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds to load

        try:
            found = AutoTokenizer.from_pretrained(self._directory, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            told = str(error).splitlines()[0].rstrip(".")
            raise BadInput(f"tokenizer {self._directory} cannot be loaded for its chat template: {told}.") from None
        if not found.chat_template:
            raise BadInput(
                f"tokenizer {self._directory} has no chat template and the prompts are messages; give it a "
                "chat_template.jinja."
            )
        return found


def _are_messages(prompt: Any) -> bool:
    return _are_all(prompt, dict) and all(isinstance(one.get("role"), str) and "content" in one for one in prompt)


def _are_ids(prompt: Any) -> bool:
    return _are_all(prompt, int) and not any(isinstance(token, bool) for token in prompt)


def _are_all(prompt: Any, kind: type) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(one, kind) for one in prompt)
