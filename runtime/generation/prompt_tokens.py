"""From what a row calls its prompt to tokens: texts are encoded, messages laid out by a chat template, ids taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from meshwright.profiles.errors import BadInput
from meshwright.runtime.generation.time_limit import TimeLimited

MOST_CHARACTERS = 4 * 2**20
"""Of a prompt. A tokenizer takes some seventy bytes of memory for each."""

_TEMPLATE_SECONDS = 10.0
"""In which a chat template lays out one prompt; one that takes longer does not end."""


class Encoder:
    """Encodes prompts with the tokenizer of a directory, or of a tokenizer.json alone, which has no chat template."""

    def __init__(self, tokenizer: Tokenizer, directory: Path, *, chat: bool) -> None:
        """With `chat` a text is a user's message."""
        self._tokenizer, self._directory, self._chat = tokenizer, directory, chat
        self._limited = TimeLimited(_TEMPLATE_SECONDS)
        self.num_ids = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, prompt: Any, place: str) -> tuple[int, ...]:
        """The tokens of a text, of messages, or of token ids, which stay as they are.

        Raises BadInput, beginning with `place`, for anything else, and for a prompt without tokens.
        """
        if prompt == "":
            raise BadInput(_NO_TOKENS.format(place=place))
        if isinstance(prompt, str) and self._chat:
            tokens = self._of_messages([{"role": "user", "content": prompt}], place)
        elif isinstance(prompt, str):
            tokens = self._of_text(prompt, place)
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
            raise BadInput(_NO_TOKENS.format(place=place))
        return tokens

    def _of_text(self, text: str, place: str) -> tuple[int, ...]:
        """The tokens of a text with the special ones that the tokenizer puts around it; those that the text itself
        begins or ends with are not put there again. None for a text that has no tokens of its own."""
        found = encoded(self._tokenizer, text, place, special=True)
        ids, is_added = tuple(found.ids), [bool(added) for added in found.special_tokens_mask]
        first = is_added.index(False) if False in is_added else len(ids)
        last = len(ids) - (is_added[::-1].index(False) if False in is_added else 0)
        before, own, behind = ids[:first], ids[first:last], ids[last:]
        if not own:
            return ()
        before = () if before and own[:first] == before else before
        behind = () if behind and own[-len(behind) :] == behind else behind
        return before + own + behind

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
        told = [{key: value for key, value in message.items() if value is not None} for message in messages]
        template = self._template
        try:
            text = self._limited.call(
                lambda: template.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
            )
        except TimeoutError:
            raise BadInput(
                f"{place}: the chat template of {self._directory} has not ended in {_TEMPLATE_SECONDS:g} seconds; "
                "correct its loops."
            ) from None
        except Exception as error:  # a template raises whatever Python does
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadInput(f"{place}: the chat template refuses the messages: {why}") from None
        return tuple(encoded(self._tokenizer, text, place, special=False).ids)

    @cached_property
    def _template(self) -> Any:
        """What applies the chat template; templates run in the sandbox of transformers."""
        found = load_with_settings(self._directory, "for its chat template")
        if not found.chat_template:
            raise BadInput(
                f"tokenizer {self._directory} has no chat template and the prompts are messages; give it a "
                "chat_template.jinja."
            )
        return found


def encoded(tokenizer: Tokenizer, text: str, place: str, *, special: bool) -> Encoding:
    """What the tokenizer makes of a text, with its special tokens around it or without. Raises BadInput, beginning with
    `place`, for a text that it cannot encode, and for one that is too long."""
    if len(text) > MOST_CHARACTERS:
        raise BadInput(
            f"{place} has {len(text)} characters, and {MOST_CHARACTERS} are the most that are encoded; shorten it, or "
            "take the row out."
        )
    try:
        return tokenizer.encode(text, add_special_tokens=special)
    except BaseException as error:
        # A regular expression that gives up panics in Rust, whose exception is no Exception and has no public name.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            told = str(error).strip().rstrip(".")
            raise BadInput(f"{place} cannot be encoded: the tokenizer says {told}; give it another one.") from None
        raise


def load_with_settings(directory: Path, why: str) -> Any:
    """What transformers loads of a directory, with its settings and its chat template; code of its own is not run.
    Raises BadInput, saying `why` it was loaded, where it cannot."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds to load

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever the files make it raise
        told = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise BadInput(f"tokenizer {directory} cannot be loaded {why}: {told}.") from None


_NO_TOKENS = "{place} has no tokens; give it a text, or take the row out."


def _are_messages(prompt: Any) -> bool:
    """Whether each has a role, and a content or calls of tools."""
    return _are_all(prompt, dict) and all(
        isinstance(one.get("role"), str) and ("content" in one or one.get("tool_calls")) for one in prompt
    )


def _are_ids(prompt: Any) -> bool:
    return _are_all(prompt, int) and not any(isinstance(token, bool) for token in prompt)


def _are_all(prompt: Any, kind: type) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(one, kind) for one in prompt)
