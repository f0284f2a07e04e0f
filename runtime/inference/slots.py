"""Prompts, the sequences in the slots and their responses: admission, progress and release, on the host.

Sampled tokens are recorded in arrays, so that the host records many rows of a round as fast as few. Every rank of a
replica records the same tokens and so keeps the same groups of slots; admission needs no message between them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.simulation.flight import SlotGroup
from meshwright.profiles.stages import TOOL_TOKEN_VERSION

if TYPE_CHECKING:
    from meshwright.runtime.inference.stopping import DecodedText, StopStrings


Numbers = NDArray[np.int64]
Reals = NDArray[np.float64]
Places = NDArray[np.int32]

_INITIAL_CAPACITY = 64
"""Initial capacity of a row in tokens."""

NO_LIMIT = 2**62
"""A length limit for prompts that have none of their own."""


class Records:
    """A row for each slot: tokens [rows, capacity], their log-probabilities, the versions that sampled them, and their
    sampling masks of `kept_size` places."""

    def __init__(self, num_rows: int, kept_size: int = 0) -> None:
        self._kept: Places = np.full((num_rows, _INITIAL_CAPACITY, kept_size), -1, dtype=np.int32)
        self._tokens: Numbers = np.zeros((num_rows, _INITIAL_CAPACITY), dtype=np.int64)
        self._logprobs: Reals = np.zeros((num_rows, _INITIAL_CAPACITY))
        self._versions: Numbers = np.zeros((num_rows, _INITIAL_CAPACITY), dtype=np.int64)
        self.num_prompt: Numbers = np.zeros(num_rows, dtype=np.int64)
        self.num_sampled: Numbers = np.zeros(num_rows, dtype=np.int64)
        """Tokens after the prompt of each row, tool tokens included."""
        self.max_tokens: Numbers = np.zeros(num_rows, dtype=np.int64)
        """Length limit of each response in tokens, `NO_LIMIT` if its prompt sets none."""
        self.sample_ids: Numbers = np.zeros(num_rows, dtype=np.int64)
        """The sample ids, which seed each row's sampling."""
        self._last: Numbers = np.zeros(num_rows, dtype=np.int64)

    def start(self, row: int, *, num_prompt: int, max_tokens: int, sample_id: int) -> None:
        """Give the row to another sequence, without tokens after its prompt."""
        self.num_prompt[row], self.max_tokens[row], self.sample_ids[row], self.num_sampled[row] = (
            num_prompt,
            max_tokens,
            sample_id,
            0,
        )

    def extend(
        self,
        row: int,
        tokens: tuple[int, ...],
        logprobs: tuple[float, ...],
        versions: tuple[int, ...],
        kept: tuple[bytes, ...] = (),
    ) -> None:
        """Append several tokens to a row; `kept` are their sampling masks, if there are any."""
        first = int(self.num_sampled[row])
        end = first + len(tokens)
        self._reserve(end)
        self._tokens[row, first:end], self._logprobs[row, first:end] = tokens, logprobs
        self._versions[row, first:end], self.num_sampled[row] = versions, end
        self._kept[row, first:end] = -1
        for position, one in enumerate(kept, first):
            places = np.frombuffer(one, dtype=np.int32)
            self._kept[row, position, : len(places)] = places
        self._last[row] = tokens[-1]

    def add(self, rows: Numbers, tokens: Numbers, logprobs: Reals, version: int, kept: Sequence[Reals] = ()) -> None:
        """Append one token to each of the rows; `kept` [K, rows] are their sampling masks, if there are any."""
        positions = self.num_sampled[rows]
        self._reserve(int(positions.max(initial=0)) + 1)
        self._tokens[rows, positions], self._logprobs[rows, positions] = tokens, logprobs
        self._versions[rows, positions] = version
        if len(kept):
            self._kept[rows, positions] = np.stack(kept, axis=-1)
        self.num_sampled[rows], self._last[rows] = positions + 1, tokens

    def add_several(self, rows: Numbers, sampled: Reals, version: int) -> None:
        """Append the tokens, log-probabilities and sampling masks of several rounds, [rounds, 2 + K, rows]."""
        count = len(sampled)
        if not count:
            return
        positions = self.num_sampled[rows] + np.arange(count)[:, None]
        self._reserve(int(positions.max()) + 1)
        self._tokens[rows, positions], self._logprobs[rows, positions] = sampled[:, 0], sampled[:, 1]
        self._versions[rows, positions] = version
        self._kept[rows, positions] = sampled[:, 2:].swapaxes(1, 2)
        self.num_sampled[rows] += count
        self._last[rows] = sampled[-1, 0]

    def last(self, rows: Numbers) -> Numbers:
        """Return the last token of each of the rows."""
        tokens: Numbers = self._last[rows]
        return tokens

    def cached(self, rows: Numbers) -> Numbers:
        """Return the number of tokens of each row whose keys and values are cached: all but the last token."""
        counts: Numbers = self.num_prompt[rows] + self.num_sampled[rows] - 1
        return counts

    def tokens(self, row: int, first: int = 0) -> list[int]:
        """Return the tokens after the prompt of a row, from index `first` on."""
        tokens: list[int] = self._tokens[row, first : self.num_sampled[row]].tolist()
        return tokens

    def logprobs(self, row: int) -> list[float]:
        return self._values(self._logprobs, row)

    def versions(self, row: int) -> list[int]:
        return self._values(self._versions, row)

    def kept(self, row: int) -> tuple[bytes, ...]:
        """Return the sampling mask of each token of a row, as in a `PartialResponse`."""
        if not self._kept.shape[2]:
            return ()
        return tuple(places[places >= 0].tobytes() for places in self._kept[row, : self.num_sampled[row]])

    def _values(self, values: Numbers | Reals, row: int) -> list:  # type: ignore[type-arg]
        return values[row, : self.num_sampled[row]].tolist()

    def _reserve(self, num_tokens: int) -> None:
        capacity = self._tokens.shape[1]
        if num_tokens > capacity:
            padding = (0, 0), (0, max(capacity, num_tokens - capacity))
            self._tokens, self._versions = np.pad(self._tokens, padding), np.pad(self._versions, padding)
            self._logprobs = np.pad(self._logprobs, padding)
            self._kept = np.pad(self._kept, (*padding, (0, 0)), constant_values=-1)


Age: TypeAlias = tuple[int, int, int]
"""A sort key that orders sequences by when they started; the younger of two has the larger one."""


class Finish(StrEnum):
    """Why a response ended."""

    EOS = "eos"
    STOP = "stop"
    """The response contains a stop string."""
    LENGTH = "length"
    """The response is truncated at its length limit."""
    CALL = "call"
    """A turn of the response calls a tool; the response continues with the answer, or is truncated if no turn is
    left."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The tokens of a prompt. `row` identifies the sequence within the prompt batch of `step`; `sample_id`
    identifies it over all steps, and seeds its sampling on whatever rank it runs."""

    row: int
    sample_id: int
    tokens: tuple[int, ...]
    step: int = 0
    max_response: int | None = None
    """Length limit of this response in tokens, if it is below the generator's own."""


@dataclass(frozen=True, kw_only=True)
class PartialResponse:
    """A sequence without a slot: a prompt and the tokens after it so far. Tokens, log-probabilities and versions have
    the same length, and so have sampling masks where they are kept."""

    prompt: Prompt
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    """Version of the weights that sampled each token; it never decreases. Tool tokens have `TOOL_TOKEN_VERSION`. If the
    cache is kept over a weight update, a token attends to keys and values of older weights: its log-probability is the
    one it was sampled with, and belongs to no single version."""
    kept: tuple[bytes, ...] = ()
    """The sampling mask of each token: the numbers of the tokens that the filters left, int32 in the order of the
    vocabulary; no bytes for a tool token."""
    first_period: int = 0
    """The period of the generator in which the first token was sampled."""

    @property
    def row(self) -> int:
        """The row of its prompt."""
        return self.prompt.row

    @property
    def num_sampled(self) -> int:
        """The number of tokens after the prompt, without tool tokens."""
        return len(self.versions) - self.versions.count(TOOL_TOKEN_VERSION)

    @property
    def step(self) -> int:
        """The step of the prompt batch that its prompt came in."""
        return self.prompt.step

    @property
    def age(self) -> Age:
        return self.first_period, self.step, self.row


@dataclass(frozen=True, kw_only=True)
class Response(PartialResponse):
    """The tokens sampled for a prompt, and why the response ended."""

    finish: Finish


@dataclass(frozen=True, kw_only=True)
class ResumedSample:
    """The tokens sampled for a prompt before the run was resumed under another plan. The tuples have the same length,
    as in a response."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish | None
    """None if the response has not ended."""
    kept: tuple[bytes, ...] = ()
    """The sampling masks, as in a response; empty where none are kept."""

    def with_prompt(self, prompt: Prompt, period: int) -> PartialResponse | Response:
        """Return the response if it has ended, else the partial response to resume, whose prompt is admitted again
        in period `period` of the generator."""
        partial = PartialResponse(
            prompt=prompt,
            tokens=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            kept=self.kept,
            first_period=period,
        )
        return Response(**vars(partial), finish=self.finish) if self.finish else partial


@dataclass(kw_only=True, eq=False)
class LiveSequence:
    """A sequence in a slot; its sampled tokens are in the records of its group."""

    prompt: Prompt
    slot: int
    records: Records
    row: int
    """Its row of the records."""
    first_period: int = 0
    texts: dict[StopStrings, DecodedText] = field(default_factory=dict)
    """The decoded text for each set of stop strings; rebuilt from the tokens where it is missing."""

    @property
    def step(self) -> int:
        return self.prompt.step

    @property
    def num_sampled(self) -> int:
        """The number of tokens after the prompt, tool tokens included (unlike in a `PartialResponse`)."""
        return int(self.records.num_sampled[self.row])

    @property
    def tokens(self) -> list[int]:
        return self.records.tokens(self.row)

    def tokens_from(self, first: int) -> list[int]:
        """Return its tokens after the prompt from index `first` on."""
        return self.records.tokens(self.row, first)

    @property
    def last_token(self) -> int:
        return int(self.records.last(np.array([self.row]))[0])

    @property
    def num_cached(self) -> int:
        """The number of tokens whose keys and values are in the cache: all but the last token."""
        return len(self.prompt.tokens) + self.num_sampled - 1

    @property
    def age(self) -> Age:
        return self.first_period, self.prompt.step, self.prompt.row

    def to_partial(self) -> PartialResponse:
        """Return its prompt and tokens, which it keeps when it loses its slot."""
        return PartialResponse(**self._fields())

    def to_response(self, finish: Finish) -> Response:
        return Response(**self._fields(), finish=finish)

    def _fields(self) -> dict[str, Any]:
        records = self.records
        columns = (
            tuple(values(self.row)) for values in (records.tokens, records.logprobs, records.versions, records.kept)
        )
        names = "tokens", "logprobs", "versions", "kept"
        return {"prompt": self.prompt, "first_period": self.first_period, **dict(zip(names, columns, strict=True))}


class LiveGroup(SlotGroup[LiveSequence]):
    """A group of slots with the tokens of its sequences."""

    def __init__(self, first_slot: int, num_slots: int) -> None:
        super().__init__(first_slot, num_slots)
        self.records = Records(num_slots)
        self._rows: Numbers = np.zeros(0, dtype=np.int64)
        self._added: list[int] = []
        """Rows of sequences that became live after `_rows` was last extended."""
        self._free = list(range(num_slots))  # a heap

    def keep_sets(self, kept_size: int) -> None:
        """Keep a sampling mask of `kept_size` places with each token from now on; the group must be empty."""
        self.records = Records(self.num_slots, kept_size)

    @property
    def rows(self) -> Numbers:
        """The record rows of the live sequences, [B]."""
        if self._added:
            self._rows, self._added = np.concatenate((self._rows, self._added)), []
        return self._rows

    @property
    def is_full(self) -> bool:
        return not self._free

    @property
    def next_slot(self) -> int:
        """The slot that the next sequence gets."""
        return self.first_slot + self._free[0]

    def add(self, partial: PartialResponse) -> LiveSequence:
        """Start or resume a sequence in the next free slot."""
        row, prompt = heapq.heappop(self._free), partial.prompt
        max_tokens = NO_LIMIT if prompt.max_response is None else prompt.max_response
        self.records.start(row, num_prompt=len(prompt.tokens), max_tokens=max_tokens, sample_id=prompt.sample_id)
        if partial.tokens:
            self.records.extend(row, partial.tokens, partial.logprobs, partial.versions, partial.kept)
        sequence = LiveSequence(
            prompt=prompt,
            slot=self.first_slot + row,
            records=self.records,
            row=row,
            first_period=partial.first_period,
        )
        self.live.append(sequence)
        self._added.append(row)
        return sequence

    def record(
        self,
        tokens: Numbers,
        logprobs: Reals,
        *,
        version: int,
        finish: Callable[[LiveGroup], Mapping[int, Finish]],
        kept: Sequence[Reals] = (),
    ) -> tuple[list[Response], list[int]]:
        """Append one token, sampled by policy `version`, to every live sequence; `kept` [K, B] are the sampling masks.

        `finish` returns which sequences end now, by their index among the live ones, and why. Return the ended
        responses, in the order of the live sequences, and the slots that are free again.
        """
        self.records.add(self.rows, tokens, logprobs, version, kept)
        return self._end(finish(self))

    def record_several(
        self,
        sampled: Reals,
        kept: Numbers,
        starts: Numbers,
        *,
        version: int,
        finish: Callable[[LiveGroup, Numbers], Mapping[int, Finish]],
    ) -> tuple[list[Response], list[int]]:
        """Append `kept` [B] tokens, sampled by policy `version`, to the live sequences; a sequence that ends with one
        of them drops the rest.

        `sampled` [2 + K, S] are tokens, log-probabilities and sampling masks; those of live sequence i begin at
        `starts[i]`. `finish` returns which of the sequences with the given indices end with their last token, and why.
        Returns the same as `record`.
        """
        finished: dict[int, Finish] = {}
        for offset in range(int(kept.max(initial=0))):
            indices = np.array([i for i in (kept > offset).nonzero()[0].tolist() if i not in finished], dtype=np.int64)
            tokens, logprobs, *masks = sampled[:, starts[indices] + offset]
            self.records.add(self.rows[indices], tokens.astype(np.int64), logprobs, version, masks)
            finished |= finish(self, indices)
        return self._end(finished)

    def _end(self, finished: Mapping[int, Finish]) -> tuple[list[Response], list[int]]:
        """Remove the live sequences with these indices; return their responses and the slots that are free again."""
        if not finished:
            return [], []
        responses = [self.live[index].to_response(why) for index, why in sorted(finished.items())]
        return responses, self.remove(finished)

    def remove(self, indices: Mapping[int, object] | Sequence[int]) -> list[int]:
        """Remove live sequences by their index among them; return the slots that are free again."""
        rows = self._remove(indices)
        for row in rows:
            heapq.heappush(self._free, row)
        return [self.first_slot + row for row in rows]

    def suspend(self, sequence: LiveSequence) -> None:
        """Suspend a live sequence: it keeps its slot and samples nothing until `resume`."""
        self._remove([self.live.index(sequence)])

    def resume(self, suspended: LiveSequence) -> None:
        """Make a suspended sequence live again, after the other live ones."""
        self.live.append(suspended)
        self._added.append(suspended.row)

    def free_slot(self, suspended: LiveSequence) -> int:
        """Free the slot of a suspended sequence and return it."""
        heapq.heappush(self._free, suspended.row)
        return suspended.slot

    def _remove(self, indices: Mapping[int, object] | Sequence[int]) -> list[int]:
        """Remove live sequences by their index among them; return their rows."""
        is_kept = np.ones(len(self.live), dtype=bool)
        is_kept[list(indices)] = False
        removed: list[int] = self.rows[~is_kept].tolist()
        self._keep(is_kept.tolist())
        self._rows = self.rows[is_kept]
        return removed


def split_into_batches(rows: Sequence[int], max_tokens: int) -> Iterator[list[tuple[int, int, int]]]:
    """Split rows with the lengths `rows` over batches of at most `max_tokens` tokens: (row, first, end) of every part.

    A row that does not fit continues in the next batch.
    """
    batch: list[tuple[int, int, int]] = []
    tokens_left = max_tokens
    for row, length in enumerate(rows):
        first = 0
        while first < length:
            end = min(length, first + tokens_left)
            batch.append((row, first, end))
            tokens_left -= end - first
            first = end
            if not tokens_left:
                yield batch
                batch, tokens_left = [], max_tokens
    if batch:
        yield batch
