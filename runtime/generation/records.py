"""What the sequences of a group have drawn, in arrays: the host serves many rows of a token round as fast as few."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Reals = NDArray[np.float64]

_ROOM = 64
"""Tokens that there is room for at first."""

NO_LIMIT = 2**62
"""Tokens after which a response ends that nothing but the generator's own limit ends."""


class Records:
    """A row for each slot: tokens [rows, room], their log-probabilities and the versions that drew them."""

    def __init__(self, num_rows: int) -> None:
        self._tokens: Numbers = np.zeros((num_rows, _ROOM), dtype=np.int64)
        self._logprobs: Reals = np.zeros((num_rows, _ROOM))
        self._versions: Numbers = np.zeros((num_rows, _ROOM), dtype=np.int64)
        self.num_prompt: Numbers = np.zeros(num_rows, dtype=np.int64)
        self.num_drawn: Numbers = np.zeros(num_rows, dtype=np.int64)
        self.most: Numbers = np.zeros(num_rows, dtype=np.int64)
        """Tokens after which each response ends by length, as its prompt has it."""
        self.draws: Numbers = np.zeros(num_rows, dtype=np.int64)
        """That seed each row's sampling."""
        self._last: Numbers = np.zeros(num_rows, dtype=np.int64)

    def begin(self, row: int, *, num_prompt: int, most: int, draw: int) -> None:
        """Another sequence has the row, of which nothing is drawn."""
        self.num_prompt[row], self.most[row], self.draws[row], self.num_drawn[row] = num_prompt, most, draw, 0

    def extend(self, row: int, tokens: tuple[int, ...], logprobs: tuple[float, ...], versions: tuple[int, ...]) -> None:
        """Puts several tokens behind what a row has drawn."""
        first = int(self.num_drawn[row])
        end = first + len(tokens)
        self._make_room(end)
        self._tokens[row, first:end], self._logprobs[row, first:end] = tokens, logprobs
        self._versions[row, first:end], self.num_drawn[row] = versions, end
        self._last[row] = tokens[-1]

    def add(self, rows: Numbers, tokens: Numbers, logprobs: Reals, version: int) -> None:
        """Puts one token behind what each of the rows has drawn."""
        places = self.num_drawn[rows]
        self._make_room(int(places.max(initial=0)) + 1)
        self._tokens[rows, places], self._logprobs[rows, places] = tokens, logprobs
        self._versions[rows, places] = version
        self.num_drawn[rows], self._last[rows] = places + 1, tokens

    def add_several(self, rows: Numbers, drawn: Reals, version: int) -> None:
        """As `add`, the tokens and log-probabilities of several rounds [rounds, 2, rows]."""
        count = len(drawn)
        if not count:
            return
        places = self.num_drawn[rows] + np.arange(count)[:, None]
        self._make_room(int(places.max()) + 1)
        self._tokens[rows, places], self._logprobs[rows, places] = drawn[:, 0], drawn[:, 1]
        self._versions[rows, places] = version
        self.num_drawn[rows] += count
        self._last[rows] = drawn[-1, 0]

    def last(self, rows: Numbers) -> Numbers:
        """The token that each of the rows drew last."""
        found: Numbers = self._last[rows]
        return found

    def cached(self, rows: Numbers) -> Numbers:
        """Tokens of each row whose keys and values are in the cache: all but the last one drawn."""
        found: Numbers = self.num_prompt[rows] + self.num_drawn[rows] - 1
        return found

    def tokens(self, row: int) -> list[int]:
        return self._of(self._tokens, row)

    def logprobs(self, row: int) -> list[float]:
        return self._of(self._logprobs, row)

    def versions(self, row: int) -> list[int]:
        return self._of(self._versions, row)

    def _of(self, values: Numbers | Reals, row: int) -> list:  # type: ignore[type-arg]
        return values[row, : self.num_drawn[row]].tolist()

    def _make_room(self, num_tokens: int) -> None:
        room = self._tokens.shape[1]
        if num_tokens > room:
            more = (0, 0), (0, max(room, num_tokens - room))
            self._tokens, self._versions = np.pad(self._tokens, more), np.pad(self._versions, more)
            self._logprobs = np.pad(self._logprobs, more)
