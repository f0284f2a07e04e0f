"""The conditions that end a response: end tokens, stop strings, length limits and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from meshwright.runtime.inference.slots import Finish, LiveGroup, Numbers


class TextSequence(Protocol):
    """A sequence whose text is searched for stop strings, by whatever engine it is sampled."""

    @property
    def tokens(self) -> list[int]:
        """The tokens after the prompt."""
        ...

    @property
    def last_token(self) -> int: ...
    @property
    def texts(self) -> dict[StopStrings, DecodedText]:
        """The decoded text for each set of stop strings; rebuilt from the tokens where it is missing."""
        ...


class StopStrings:
    """Strings that end a response whose text contains one of them.

    Text is matched, not tokens: a string may start and end anywhere within a token and span any number of tokens. The
    response keeps the stop string, and all of the token that completes it. Special tokens count as the text that spells
    them; the prompt does not count.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        self._num_kept = max(map(len, strings), default=1) - 1

    def complete(self, sequence: TextSequence) -> bool:
        """Return True if the last sampled token completes one of the strings; must be called once after every token."""
        text = sequence.texts.get(self)
        if text is None:
            text = sequence.texts[self] = DecodedText(self._tokenizer)
            for token in sequence.tokens[:-1]:  # a sequence that was pre-empted or resumed
                text.append(token, self._strings, self._num_kept)
        return text.append(sequence.last_token, self._strings, self._num_kept)


class DecodedText:
    """The last characters of a response's text, decoded token by token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._end = ""

    def append(self, token: int, strings: Sequence[str], kept: int) -> bool:
        """Append a token; return True if it completes one of `strings`. Keep the last `kept` characters for the next
        token."""
        piece = self._stream.step(self._tokenizer, token)
        if piece is None:  # bytes of an incomplete character
            return False
        text = self._end + piece
        self._end = text[max(0, len(text) - kept) :]
        return any(string in text for string in strings)


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """The conditions under which a response ends: an end token, which stays in it, a stop string, or its length limit,
    in this order of precedence. A tool call, which ends a turn, comes before the length limit."""

    eos_tokens: frozenset[int]
    max_response: int
    strings: StopStrings | None = None
    call_end: StopStrings | None = None

    def finish(self, group: LiveGroup, indices: Numbers | None = None) -> dict[int, Finish]:
        """Return which live sequences of a group end with the last sampled tokens, by index, and why.

        Only the sequences with the given `indices` got a token; by default all did.
        """
        records = group.records
        indices = np.arange(len(group.live)) if indices is None else indices
        rows = group.rows[indices]
        # In ascending order of precedence: a later reason replaces an earlier one.
        finished = _finish_where(
            indices, records.num_sampled[rows] >= np.minimum(records.max_tokens[rows], self.max_response), Finish.LENGTH
        )
        for strings, reason in ((self.call_end, Finish.CALL), (self.strings, Finish.STOP)):
            if strings is not None:
                finished |= {index: reason for index in indices.tolist() if strings.complete(group.live[index])}
        if self.eos_tokens:
            finished |= _finish_where(indices, (records.last(rows) == self._ends).any(axis=0), Finish.EOS)
        return finished

    def tokens_left(self, group: LiveGroup) -> Numbers:
        """Return how many more tokens each live sequence of a group may sample, [B]."""
        rows, records = group.rows, group.records
        left: Numbers = np.minimum(records.max_tokens[rows], self.max_response) - records.num_sampled[rows]
        return left

    def num_tokens_left(self, group: LiveGroup) -> int:
        """Return how many more tokens every live sequence of a group may sample: the smallest number of any."""
        return int(self.tokens_left(group).min())

    def any_end(self, tokens: Numbers) -> bool:
        """Return True if one of the tokens [B] is an end token."""
        return bool(self.eos_tokens) and bool((tokens == self._ends).any())

    @cached_property
    def _ends(self) -> Numbers:
        return np.array(sorted(self.eos_tokens), dtype=np.int64)[:, None]


def _finish_where(indices: Numbers, is_finished: NDArray[np.bool_], reason: Finish) -> dict[int, Finish]:
    return dict.fromkeys(indices[is_finished].tolist(), reason)
