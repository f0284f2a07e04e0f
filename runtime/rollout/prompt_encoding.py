"""The tokens of a prompt: texts are encoded, messages are laid out by a chat template, and token ids are taken as they
are.

A chat template is third-party code that may loop forever, so it runs with a time limit.
"""

from __future__ import annotations

import ctypes
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Encoding, Tokenizer

from meshwright.profiles.errors import BadInput

T = TypeVar("T")


class _EndedError(BaseException):
    """Raised in a thread whose call took too long; a BaseException, so that the called code does not catch it as an
    Exception."""


class TimeLimited:
    """Makes calls one after another on a thread of its own, and ends a call that takes longer than `seconds`.

    Only Python code can be ended: a call that never returns from C stays on its thread until the process ends.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] | None = None
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], T]) -> T:
        """Return or raise what the function does. Raises TimeoutError if it takes longer than the limit."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self._calls,), daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._calls.put((function, future))
        try:
            return future.result(self._seconds)
        except TimeoutError:
            if not future.done():
                self._end()
            raise

    def _end(self) -> None:
        """Raise an exception in the thread at its next line of Python; later calls get a new thread."""
        assert self._thread is not None
        assert self._thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), ctypes.py_object(_EndedError))
        self._calls = self._thread = None


def _serve(calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]) -> None:
    try:
        while True:
            function, future = calls.get()
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
    except _EndedError:
        return


MAX_CHARACTERS = 4 * 2**20
"""Maximum characters of a prompt; a tokenizer takes about seventy bytes of memory for each."""

_TEMPLATE_SECONDS = 10.0
"""Seconds that a chat template may take for one prompt; one that takes longer is assumed not to end."""


class PromptEncoder:
    """Encodes prompts with the tokenizer of a directory, or of a tokenizer.json alone, which has no chat template."""

    def __init__(self, tokenizer: Tokenizer, directory: Path, *, chat: bool) -> None:
        """If `chat`, a text is encoded as a message of the user."""
        self._tokenizer, self._directory, self._chat = tokenizer, directory, chat
        self._limited = TimeLimited(_TEMPLATE_SECONDS)
        self.num_ids = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, prompt: Any, place: str) -> tuple[int, ...]:
        """Return the tokens of a text, of messages, or of token ids, which are kept as they are.

        Raises BadInput, with a message that starts with `place` (the prompt's file and line), for anything else and for
        a prompt without tokens.
        """
        if prompt == "":
            raise BadInput(_NO_TOKENS.format(place=place))
        if isinstance(prompt, str) and self._chat:
            tokens = self._encode_messages([{"role": "user", "content": prompt}], place)
        elif isinstance(prompt, str):
            tokens = self._encode_text(prompt, place)
        elif _are_messages(prompt):
            tokens = self._encode_messages(prompt, place)
        elif _are_ids(prompt):
            tokens = self._check_ids(prompt, place)
        else:
            raise BadInput(
                f"{place} has a prompt that is neither a text nor messages with role and content nor token ids; give "
                "one of these."
            )
        if not tokens:
            raise BadInput(_NO_TOKENS.format(place=place))
        return tokens

    def messages(self, prompt: Any, place: str) -> tuple[Mapping[str, Any], ...]:
        """Return the messages of a prompt that is a chat, and none for other prompts.

        Raises BadInput, with a message that starts with `place`, for values that JSON does not have.
        """
        chat = [{"role": "user", "content": prompt}] if self._chat and isinstance(prompt, str) else prompt
        if not _are_messages(chat):
            return ()
        try:
            return tuple(json.loads(json.dumps([_without_nothing(message) for message in chat])))
        except (TypeError, ValueError) as error:
            raise BadInput(
                f"{place} has a message that rewards cannot get as JSON: {error}; write texts, numbers and lists."
            ) from None

    def _encode_text(self, text: str, place: str) -> tuple[int, ...]:
        """Encode a text with the special tokens that the tokenizer puts around it, unless the text itself starts or
        ends with them. Return () for a text without tokens of its own."""
        encoding = encode_text(self._tokenizer, text, place, special=True)
        ids, is_added = tuple(encoding.ids), [bool(added) for added in encoding.special_tokens_mask]
        first = is_added.index(False) if False in is_added else len(ids)
        last = len(ids) - (is_added[::-1].index(False) if False in is_added else 0)
        prefix, content, suffix = ids[:first], ids[first:last], ids[last:]
        if not content:
            return ()
        # A text may spell out the special tokens itself, as one laid out by a chat template does; they come once.
        prefix = () if prefix and content[:first] == prefix else prefix
        suffix = () if suffix and content[-len(suffix) :] == suffix else suffix
        return prefix + content + suffix

    def _check_ids(self, ids: Sequence[int], place: str) -> tuple[int, ...]:
        unknown = next((token for token in ids if not 0 <= token < self.num_ids), None)
        if unknown is not None:
            raise BadInput(
                f"{place} has the token id {unknown}, and the tokenizer has ids from 0 to {self.num_ids - 1}."
            )
        return tuple(ids)

    def _encode_messages(self, messages: Sequence[Mapping[str, Any]], place: str) -> tuple[int, ...]:
        """Encode messages as the chat template lays them out, with its special tokens and its generation prompt."""
        if messages[-1]["role"] == "assistant":
            raise BadInput(f"{place} ends with a message of the assistant, which is to answer; take that message out.")
        fields = [_without_nothing(message) for message in messages]
        tokenizer = self._chat_tokenizer
        try:
            text = self._limited.call(
                lambda: tokenizer.apply_chat_template(fields, tokenize=False, add_generation_prompt=True)
            )
        except TimeoutError:
            raise BadInput(
                f"{place}: the chat template of {self._directory} has not ended in {_TEMPLATE_SECONDS:g} seconds; "
                "correct its loops."
            ) from None
        except Exception as error:  # a template may raise any exception
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadInput(f"{place}: the chat template refuses the messages: {why}") from None
        return tuple(encode_text(self._tokenizer, text, place, special=False).ids)

    @cached_property
    def _chat_tokenizer(self) -> Any:
        """The tokenizer that applies the chat template; templates run in the sandbox of transformers."""
        tokenizer = load_with_settings(self._directory, "for its chat template")
        if not tokenizer.chat_template:
            raise BadInput(
                f"tokenizer {self._directory} has no chat template and the prompts are messages; give it a "
                "chat_template.jinja."
            )
        return tokenizer


def encode_text(tokenizer: Tokenizer, text: str, place: str, *, special: bool) -> Encoding:
    """Encode a text, with the tokenizer's special tokens around it if `special`. Raises BadInput, with a message that
    starts with `place`, for a text that cannot be encoded or is too long."""
    if len(text) > MAX_CHARACTERS:
        raise BadInput(
            f"{place} has {len(text)} characters, and {MAX_CHARACTERS} are the most that are encoded; shorten it, or "
            "take the row out."
        )
    try:
        return tokenizer.encode(text, add_special_tokens=special)
    except BaseException as error:
        # A regular expression that exceeds its limits panics in Rust. The panic is raised as a class that does not
        # derive from Exception and cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            reason = str(error).strip().rstrip(".")
            raise BadInput(
                f"{place} cannot be encoded: the tokenizer says {reason}; change the text, or use another tokenizer."
            ) from None
        raise


def load_with_settings(directory: Path, why: str) -> Any:
    """Load the tokenizer of a directory with transformers, with its settings and its chat template, without running
    code of the directory. Raises BadInput, which says `why` it was loaded, if it cannot be loaded."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds to load

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises errors of any type for bad files
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise BadInput(f"tokenizer {directory} cannot be loaded {why}: {reason}.") from None


_NO_TOKENS = "{place} has no tokens; give it a text, or take the row out."


def _without_nothing(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the keys that are null, which tables have for keys of other rows."""
    return {key: value for key, value in message.items() if value is not None}


def _are_messages(prompt: Any) -> bool:
    """True if each item has a role, and a content or tool calls."""
    return _are_all(prompt, dict) and all(
        isinstance(message.get("role"), str) and ("content" in message or message.get("tool_calls"))
        for message in prompt
    )


def _are_ids(prompt: Any) -> bool:
    return _are_all(prompt, int) and not any(isinstance(token, bool) for token in prompt)


def _are_all(prompt: Any, kind: type) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(item, kind) for item in prompt)
