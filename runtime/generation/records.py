"""The sampled tokens of the sequences of a group, in arrays: the host then records many rows of a round as fast as
few."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Reals = NDArray[np.float64]

_INITIAL_CAPACITY = 64
"""Initial capacity of a row in tokens."""

NO_LIMIT = 2**62
"""A length limit for prompts that have none of their own."""


class Records:
    """A row for each slot: tokens [rows, capacity], their log-probabilities and the versions that sampled them."""

    def __init__(self, num_rows: int) -> None:
        self._tokens: Numbers = np.zeros((num_rows, _INITIAL_CAPACITY), dtype=np.int64)
        self._logprobs: Reals = np.zeros((num_rows, _INITIAL_CAPACITY))
        self._versions: Numbers = np.zeros((num_rows, _INITIAL_CAPACITY), dtype=np.int64)
        self.num_prompt: Numbers = np.zeros(num_rows, dtype=np.int64)
        self.num_sampled: Numbers = np.zeros(num_rows, dtype=np.int64)
        self.max_tokens: Numbers = np.zeros(num_rows, dtype=np.int64)
        """Length limit of each response in tokens, from its prompt."""
        self.sample_ids: Numbers = np.zeros(num_rows, dtype=np.int64)
        """The sample ids, which seed each row's sampling."""
        self._last: Numbers = np.zeros(num_rows, dtype=np.int64)

    def start(self, row: int, *, num_prompt: int, max_tokens: int, sample_id: int) -> None:
        """Give the row to another sequence, for which nothing has been sampled."""
        self.num_prompt[row], self.max_tokens[row], self.sample_ids[row], self.num_sampled[row] = (
            num_prompt,
            max_tokens,
            sample_id,
            0,
        )

    def extend(self, row: int, tokens: tuple[int, ...], logprobs: tuple[float, ...], versions: tuple[int, ...]) -> None:
        """Append several tokens to a row."""
        first = int(self.num_sampled[row])
        end = first + len(tokens)
        self._reserve(end)
        self._tokens[row, first:end], self._logprobs[row, first:end] = tokens, logprobs
        self._versions[row, first:end], self.num_sampled[row] = versions, end
        self._last[row] = tokens[-1]

    def add(self, rows: Numbers, tokens: Numbers, logprobs: Reals, version: int) -> None:
        """Append one token to each of the rows."""
        places = self.num_sampled[rows]
        self._reserve(int(places.max(initial=0)) + 1)
        self._tokens[rows, places], self._logprobs[rows, places] = tokens, logprobs
        self._versions[rows, places] = version
        self.num_sampled[rows], self._last[rows] = places + 1, tokens

    def add_several(self, rows: Numbers, sampled: Reals, version: int) -> None:
        """Append the tokens and log-probabilities of several rounds, [rounds, 2, rows]."""
        count = len(sampled)
        if not count:
            return
        places = self.num_sampled[rows] + np.arange(count)[:, None]
        self._reserve(int(places.max()) + 1)
        self._tokens[rows, places], self._logprobs[rows, places] = sampled[:, 0], sampled[:, 1]
        self._versions[rows, places] = version
        self.num_sampled[rows] += count
        self._last[rows] = sampled[-1, 0]

    def last(self, rows: Numbers) -> Numbers:
        """Return the last sampled token of each of the rows."""
        tokens: Numbers = self._last[rows]
        return tokens

    def cached(self, rows: Numbers) -> Numbers:
        """Return the number of tokens of each row whose keys and values are cached: all but the last one sampled."""
        counts: Numbers = self.num_prompt[rows] + self.num_sampled[rows] - 1
        return counts

    def tokens(self, row: int) -> list[int]:
        return self._values(self._tokens, row)

    def logprobs(self, row: int) -> list[float]:
        return self._values(self._logprobs, row)

    def versions(self, row: int) -> list[int]:
        return self._values(self._versions, row)

    def _values(self, values: Numbers | Reals, row: int) -> list:  # type: ignore[type-arg]
        return values[row, : self.num_sampled[row]].tolist()

    def _reserve(self, num_tokens: int) -> None:
        capacity = self._tokens.shape[1]
        if num_tokens > capacity:
            padding = (0, 0), (0, max(capacity, num_tokens - capacity))
            self._tokens, self._versions = np.pad(self._tokens, padding), np.pad(self._versions, padding)
            self._logprobs = np.pad(self._logprobs, padding)
