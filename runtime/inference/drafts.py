"""Drafts for speculative decoding, from earlier responses to the same prompt.

A draft continues the longest suffix of a sequence that occurred before in one of the prompt's texts: the prompt, its
earlier responses, those of the other samples of its group, and the sequence itself. Saxena, Prompt Lookup Decoding
(https://github.com/apoorvumang/prompt-lookup-decoding, 2023), matches the prompt and the sequence; Oliaro et al.,
SuffixDecoding (arXiv:2411.04975), earlier outputs too. The engine verifies the drafts.

Drafts decide how many tokens a decode round samples, and so when a period ends. A resumed run therefore drafts the
same: the index of a prompt's texts lasts for one period, and is built from the history, which checkpoints hold, and
from the sequences in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from meshwright.profiles.trace import NUM_ROW_ROUNDS, num_accepted, num_drafted
from meshwright.runtime.inference.sampling import uniforms
from meshwright.runtime.inference.slots import Numbers, PartialResponse, Prompt

Tokens: TypeAlias = tuple[int, ...]

_MATCHED_TOKENS = (8, 4, 2)
"""Lengths of the suffixes that are looked up, the longest first."""

_MAX_HISTORY_TOKENS = 2**24
"""Tokens of all responses that a history holds: 128 MiB of tuples on the host; the oldest are dropped first."""


class ResponseHistory:
    """The delivered responses of a replica, by the tokens of their prompt: those of the last batch with the prompt."""

    def __init__(self, max_tokens: int = _MAX_HISTORY_TOKENS) -> None:
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._responses: dict[Tokens, list[Tokens]] = {}
        """The prompts in the order in which they were last sampled."""
        self._steps: dict[Tokens, int] = {}

    def responses(self, prompt: Tokens) -> Sequence[Tokens]:
        """Return the responses to a prompt, the oldest first."""
        return self._responses.get(prompt, ())

    def add(self, prompt: Tokens, response: Tokens, step: int) -> None:
        """Add a response to a prompt of the batch of `step`; those of the prompt's earlier batches are dropped."""
        if self._steps.get(prompt) != step:
            self._drop(prompt)
        self._responses.setdefault(prompt, []).append(response)
        self._steps[prompt] = step
        self._num_tokens += len(response)
        while self._num_tokens > self._max_tokens:
            self._drop(next(iter(self._responses)))

    def entries(self) -> Iterator[tuple[Tokens, int, Tokens]]:
        """Yield prompt, step and response of all that it holds, in the order in which `add` restores them."""
        for prompt, responses in self._responses.items():
            for response in responses:
                yield prompt, self._steps[prompt], response

    def _drop(self, prompt: Tokens) -> None:
        self._num_tokens -= sum(map(len, self._responses.pop(prompt, ())))
        self._steps.pop(prompt, None)


class PromptTexts:
    """The texts of one prompt, and where their n-grams occurred last."""

    def __init__(self, prompt: Tokens) -> None:
        self._texts: list[list[int]] = []
        self._followers: dict[Tokens, tuple[int, int]] = {}
        """For each n-gram, the text and the position of the token that followed its latest occurrence."""
        self._overlap = list(prompt[-max(_MATCHED_TOKENS) :])
        self.extend(self._new_text(), prompt)

    def add(self, tokens: Iterable[int]) -> int:
        """Add a response with these tokens so far; return its number."""
        self._texts.append(list(self._overlap))
        number = len(self._texts) - 1
        self.extend(number, tokens)
        return number

    def extend(self, number: int, tokens: Iterable[int]) -> None:
        """Append tokens to a text."""
        text, followers = self._texts[number], self._followers
        for token in tokens:
            position = len(text)
            for length in _MATCHED_TOKENS:
                if length <= position:
                    followers[tuple(text[position - length :])] = number, position
            text.append(token)

    def draft(self, number: int, max_tokens: int) -> Tokens:
        """Return at most `max_tokens` tokens that followed the longest known suffix of a text; none if no suffix
        occurred before."""
        text = self._texts[number]
        for length in _MATCHED_TOKENS:
            if length <= len(text) and (found := self._followers.get(tuple(text[-length:]))):
                source, position = found
                return tuple(self._texts[source][position : position + max_tokens])
        return ()

    def _new_text(self) -> int:
        self._texts.append([])
        return len(self._texts) - 1


class DraftedSequence(Protocol):
    """A live sequence of any engine."""

    @property
    def prompt(self) -> Prompt: ...
    def tokens_from(self, first: int) -> Sequence[int]:
        """Return its tokens after the prompt from index `first` on."""
        ...


class Drafter:
    """Drafts for the sequences of one generator during a period."""

    def __init__(self, draft_tokens: int, history: ResponseHistory) -> None:
        """Drafts have at most `draft_tokens` tokens; `history` has what was delivered before the period."""
        self.draft_tokens, self._history = draft_tokens, history
        self._in_flight: dict[Tokens, list[Tokens]] = {}
        self._texts: dict[Tokens, PromptTexts] = {}
        self._numbers: dict[int, int] = {}
        """The number of each sequence's text, by sample id."""
        self._num_known: dict[int, int] = {}
        """Tokens after the prompt that each sequence's text has, by sample id."""

    def begin_period(self, in_flight: Iterable[PartialResponse]) -> None:
        """Start a period with these sequences in flight, ended ones included."""
        for by_key in (self._in_flight, self._texts, self._numbers, self._num_known):
            by_key.clear()
        for sequence in sorted(in_flight, key=lambda one: (one.step, one.row)):
            self._in_flight.setdefault(sequence.prompt.tokens, []).append(sequence.tokens)

    def draft(self, sequence: DraftedSequence, max_tokens: int) -> Tokens:
        """Return a draft of at most `max_tokens` tokens for a live sequence."""
        if max_tokens <= 0:
            return ()
        prompt = sequence.prompt
        texts = self._extend(prompt, sequence.tokens_from(self._num_known.get(prompt.sample_id, 0)))
        return texts.draft(self._numbers[prompt.sample_id], min(max_tokens, self.draft_tokens))

    def end(self, response: PartialResponse) -> None:
        """Complete the text of a sequence that has ended, from which others of its group are drafted."""
        self._extend(response.prompt, response.tokens[self._num_known.get(response.prompt.sample_id, 0) :])

    def _extend(self, prompt: Prompt, tokens: Sequence[int]) -> PromptTexts:
        """Append tokens to the text of a sequence; return the texts of its prompt."""
        texts, sample_id = self._texts.get(prompt.tokens), prompt.sample_id
        if texts is None:
            texts = self._texts[prompt.tokens] = PromptTexts(prompt.tokens)
            for response in (*self._history.responses(prompt.tokens), *self._in_flight.get(prompt.tokens, ())):
                texts.add(response)
        if sample_id not in self._numbers:
            self._numbers[sample_id], self._num_known[sample_id] = texts.add(()), 0
        texts.extend(self._numbers[sample_id], tokens)
        self._num_known[sample_id] += len(tokens)
        return texts


class VerifiedRows(NamedTuple):
    """The drafts of a decode round: the tokens [D] of all of them, and how many each live sequence of the group has."""

    tokens: Numbers
    counts: Numbers
    """Drafted tokens of each live sequence, [B]."""

    @classmethod
    def of(cls, drafts: Sequence[Tokens]) -> VerifiedRows:
        """Return the drafts of the live sequences, in their order."""
        counts = np.array([len(draft) for draft in drafts], dtype=np.int64)
        return cls(np.array([token for draft in drafts for token in draft], dtype=np.int64), counts)

    def uniforms(self, seed: int, sample_ids: Numbers, positions: Numbers) -> Tensor:
        """Return the random numbers [B + D] of the tokens that the round samples, from the sample ids [B] and the
        positions [B] of the first token of each sequence."""
        repeats = self.counts + 1
        offsets = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        return torch.from_numpy(uniforms(seed, np.repeat(sample_ids, repeats), np.repeat(positions, repeats) + offsets))

    def num_kept(self, sampled: Numbers) -> Numbers:
        """Return how many of the tokens sampled for each sequence are kept, [B].

        `sampled` [B + D] has for each sequence a token after its last one and after each token of its draft. The first
        is kept; each other one is kept if the token before it is the one that was drafted there. Every token was
        sampled from the policy after the tokens before it, with the random number of its position, so those that are
        kept are the tokens that decoding one by one samples. A draft x is accepted with probability p(x), and the token
        in place of a rejected one is distributed as p without x, renormalised: for drafts without randomness this is
        the rejection sampling of Leviathan et al. (arXiv:2211.17192, algorithm 1).
        """
        ends = np.cumsum(self.counts + 1)
        kept = np.ones(len(self.counts), dtype=np.int64)
        drafted = np.cumsum(self.counts) - self.counts
        for row, (end, count, first) in enumerate(zip(ends, self.counts, drafted, strict=True)):
            if count:
                agrees = sampled[end - count - 1 : end - 1] == self.tokens[first : first + count]
                kept[row] += int(agrees.cumprod().sum())
        return kept


class AcceptanceCounts:
    """Counts of a generator's decode rounds, from which the acceptance by position follows."""

    def __init__(self, draft_tokens: int) -> None:
        self.num_rounds = 0
        """Decode rounds, counted once for each sequence."""
        self.drafted: Numbers = np.zeros(draft_tokens, dtype=np.int64)
        """Rounds in which a token was drafted at each position and those before it were accepted."""
        self.accepted: Numbers = np.zeros(draft_tokens, dtype=np.int64)
        """Rounds in which the token at each position was accepted."""

    def record(self, counts: Numbers, kept: Numbers, recorded: Numbers) -> None:
        """Record a round of sequences with `counts` [B] drafted tokens, of whose sampled tokens `kept` [B] were kept
        and, as a sequence may end before the last of them, `recorded` [B] were appended."""
        self.num_rounds += len(counts)
        positions = np.arange(len(self.drafted))[:, None]
        # The token at a position of a draft is compared with the token sampled at this position, if that was appended.
        tried = positions < np.minimum(counts, recorded)
        self.drafted += tried.sum(axis=1)
        self.accepted += (tried & (positions < kept - 1)).sum(axis=1)

    def clear(self) -> None:
        """Start counting again."""
        self.num_rounds = 0
        self.drafted[:] = self.accepted[:] = 0

    def facts(self) -> dict[str, float]:
        """Return the counts as facts of a trace; none without drafts."""
        positions = range(len(self.drafted))
        if not positions:
            return {}
        return {
            NUM_ROW_ROUNDS: float(self.num_rounds),
            **{num_drafted(position): float(self.drafted[position]) for position in positions},
            **{num_accepted(position): float(self.accepted[position]) for position in positions},
        }
