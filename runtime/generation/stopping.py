"""When a response ends, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from meshwright.runtime.generation.records import Numbers
from meshwright.runtime.generation.slots import Finish, LiveGroup, LiveSequence


class StopStrings:
    """Strings that end a response whose text contains one of them.

    Text is matched, not tokens: a string may begin and end anywhere within a token and span any number of them. The
    response keeps the stop string, and of the token that completes it also what lies beyond. Special tokens count as
    the text that spells them; the prompt does not count.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        self._kept = max(map(len, strings), default=1) - 1

    def complete(self, sequence: LiveSequence) -> bool:
        """Whether the token drawn last completes one of the strings; to be asked once after every token."""
        text = sequence.texts.get(self)
        if text is None:
            text = sequence.texts[self] = DecodedText(self._tokenizer)
            for token in sequence.tokens[:-1]:  # those of a sequence that had no slot for a while
                text.grow(token, self._strings, self._kept)
        return text.grow(sequence.last_token, self._strings, self._kept)


class DecodedText:
    """The text of a response as it grows, of which only the end is kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._end = ""

    def grow(self, token: int, strings: Sequence[str], kept: int) -> bool:
        """Whether one of `strings` is completed; `kept` characters are kept for the next token."""
        piece = self._stream.step(self._tokenizer, token)
        if piece is None:  # bytes that are no character yet
            return False
        text = self._end + piece
        self._end = text[max(0, len(text) - kept) :]
        return any(string in text for string in strings)


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """A response ends by an end token, which stays in it, by a stop string, or by length, in this order; before length
    comes that a turn of it calls a tool."""

    eos_tokens: frozenset[int]
    max_response: int
    strings: StopStrings | None = None
    calls: StopStrings | None = None

    def finish(self, group: LiveGroup) -> dict[int, Finish]:
        """Which live sequences of a group end with the tokens drawn last, by their place among them, and why."""
        rows, records = group.rows, group.records
        found = _those(records.num_drawn[rows] >= np.minimum(records.most[rows], self.max_response), Finish.LENGTH)
        for strings, why in ((self.calls, Finish.CALL), (self.strings, Finish.STOP)):
            if strings is not None:
                complete = map(strings.complete, group.live)
                found |= dict.fromkeys((index for index, is_over in enumerate(complete) if is_over), why)
        if self.eos_tokens:
            found |= _those((records.last(rows) == self._ends).any(axis=0), Finish.EOS)
        return found

    def left(self, group: LiveGroup) -> int:
        """How many tokens all live sequences of a group may yet draw."""
        rows, records = group.rows, group.records
        found = np.minimum(records.most[rows], self.max_response) - records.num_drawn[rows]
        return int(found.min())

    def is_end(self, tokens: Numbers) -> bool:
        """Whether one of the tokens [B] is an end token."""
        return bool(self.eos_tokens) and bool((tokens == self._ends).any())

    @cached_property
    def _ends(self) -> Numbers:
        return np.array(sorted(self.eos_tokens), dtype=np.int64)[:, None]


def _those(are_over: NDArray[np.bool_], why: Finish) -> dict[int, Finish]:
    return dict.fromkeys(are_over.nonzero()[0].tolist(), why)
