"""Seconds of continuous batching over the distribution of lengths.

A replica's slots form min(pp, slots) groups that are in flight together. In a decode round each group processes its
last sampled tokens, admits prompts into free slots and samples one token for each live sequence, so a response of n
tokens takes n rounds, the first of which is its prefill. With m live groups, p pipeline stages and tau seconds of a
group on one stage, a round takes max(m, p) x tau, because a group's next token waits for its last one to leave the last
stage (for m < p, the pipeline bubble of Narayanan et al., arXiv:2104.04473, section 2.2). For the number of rounds see
`cost_models.rounds`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from meshwright.cost_models.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    SEND_RECEIVE,
    Groups,
    Network,
    SecondsByBytes,
)
from meshwright.cost_models.compute import Pass, Passes, Shard
from meshwright.cost_models.cost import Cost, Tally
from meshwright.cost_models.params import LayerCounts
from meshwright.cost_models.protocol import StageQuery
from meshwright.cost_models.rounds import Rounds, RoundWindow
from meshwright.profiles.frameworks import Framework
from meshwright.profiles.speculation import NO_DRAFTS, DraftRound
from meshwright.profiles.table import TimedPass

RECOMPUTATION = "cache recomputation"
"""Name of the term for recomputing the cache of sequences in flight, once a period."""

PREEMPTION = "pre-emption"
"""Name of the term for recomputing the cache of pre-empted sequences."""

SCHEDULING = "scheduling"
"""Name of the term for the host between rounds of decoding."""

ENGINE_LOAD = "weights to the engine"
"""Name of the term for the measured load of weights into an engine in its own process, at the start of a period."""

ENGINE_WAKE, ENGINE_SLEEP = "cache taken", "cache freed"
"""Names of the terms for an engine in its own process that takes the memory of its KV cache before a run of the stage,
and frees it afterwards."""

OUTSIDE_ROUNDS = (ENGINE_LOAD, ENGINE_WAKE, ENGINE_SLEEP)
"""Names of the terms for what an engine in its own process does before and after its rounds."""

_SAMPLED_BYTES = 16
"""Bytes of a sampled token and its log-probability, both sent in fp64."""

_SQUARES_BYTES = 8
"""Bytes of the mean squares of a token's queries and keys, in 32 bits, which ranks add up where both are normalised
over all heads (vLLM, model_executor/models/minimax_m2.py)."""

_NO_PROMPTS = 1e-9
"""Number of prompts below which a rounding error of a sum is taken for zero."""

_TERM_NAMES = {
    timed_pass: (f"{timed_pass.value} layers", f"{timed_pass.value} embedding and head")
    for timed_pass in (TimedPass.DECODE, TimedPass.PREFILL)
}


class Load(NamedTuple):
    """Passes of single groups, their number, and the rows and new tokens of the mean pass."""

    passes: Passes
    number: float
    mean_rows: float
    mean_tokens: float


class Work(NamedTuple):
    """The passes and host work of one replica in a generation; independent of tp."""

    loads: tuple[tuple[TimedPass, Load], ...]
    host_iterations: float  # host iterations, each for one group
    num_sampled: float  # sampled tokens that the host processes, those of rejected drafts included
    num_shared: float  # rounds with both a prefill and a decode step


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Cost of `actor_generate` on one replica."""

    query: StageQuery
    shard: Shard
    groups: Groups[float]
    network: Network
    element_bytes: int
    framework: Framework
    has_mixed_batches: bool = False
    """True if a prefill and a decode step of one round are one pass, and what a round takes for any number of tokens is
    in the seconds of both. It is taken to be the decode step of one row."""

    def seconds(self, work: Work) -> Cost:
        """Return the seconds of prefills and decode rounds on the slowest pipeline stage, and of the host."""
        tally, framework = Tally(), self.framework
        for timed_pass, load in work.loads:
            is_shared = self.has_mixed_batches and timed_pass is TimedPass.DECODE
            self._add(tally, timed_pass, _without_shared(load, work.num_shared) if is_shared else load)
        host_seconds = work.host_iterations * framework.round_seconds + work.num_sampled * framework.row_seconds
        if framework.overlapped_host:
            host_seconds = max(0.0, host_seconds - tally.cost().total)
        tally.add(SCHEDULING, host_seconds)
        return tally.cost()

    def lower_bound_seconds(
        self, layers: float, ends: float, num_rounds: float, num_tokens: float, num_groups: int
    ) -> float:
        """Return a lower bound on the seconds of a generation that samples `num_tokens` tokens in `num_rounds` rounds.

        `layers` and `ends` are lower bounds on the seconds of one layer, and of embedding and head, over all rounds.
        Collectives have a latency, so fewer and larger ones never take longer. Collectives of experts are left out.
        """
        counts, groups, collectives, pp = self._layer_counts, self.groups, self._collectives, self.query.layout.pp
        seconds = max(counts.most * layers, counts.last * layers + ends)
        number, rows = num_rounds * pp, num_tokens / num_groups / num_rounds
        if groups.tensor.size > 1:
            reduced, gathered = (
                collectives.reduce(rows * self._hidden_bytes)[0],
                collectives.gather(rows * self._logits_bytes)[0],
            )
            seconds += number * ((2 * counts.last + 1) * reduced + gathered)
        if pp > 1:
            seconds += number * (
                collectives.send(rows * self._hidden_bytes)[0] + (pp - 1) * collectives.send(rows * _SAMPLED_BYTES)[0]
            )
        host = self.framework
        host_seconds = num_rounds * num_groups * host.round_seconds + num_tokens * host.row_seconds
        return max(seconds, host_seconds) if host.overlapped_host else seconds + host_seconds

    def recomputation(self, rows: float, tokens: float, num_groups: int) -> Cost:
        """Return the cost of recomputing the cache of `rows` sequences of `tokens` tokens on average, as a single term.

        Each group does one packed prefill (Fu et al., AReaL, arXiv:2505.24298, section 4.1: interruptible generation).
        """
        passes, tally, pp = Tally(), Tally(), self.query.layout.pp
        self._add(passes, TimedPass.PREFILL, _load([(num_groups + pp - 1, rows / num_groups, tokens, 0.0)]))
        for term in passes.cost().terms:
            tally.add(RECOMPUTATION, term.amount, term.source)
        return tally.cost()

    def preemption(self, times: float, tokens: float, mean_prompt: float) -> Cost:
        """Return the cost of recomputing pre-empted sequences, as a single term.

        `times` pre-emptions a period discard `tokens` tokens each time. The youngest sequences are pre-empted, which
        hold little more than their prompts.
        """
        passes, tally = Tally(), Tally()
        self._add(passes, TimedPass.PREFILL, _load([(times, max(1.0, tokens / mean_prompt), mean_prompt, 0.0)]))
        for term in passes.cost().terms:
            tally.add(PREEMPTION, term.amount, term.source)
        return tally.cost()

    def _add(self, tally: Tally, timed_pass: TimedPass, load: Load) -> None:
        """Add passes of single groups; collectives are costed at the mean pass, since they are linear in its size."""
        layers, at_ends, source = self.shard.total(timed_pass, load.passes)
        num_layers, has_ends = self._layer_counts.slowest(layers, at_ends)
        in_layers, in_ends = _TERM_NAMES[timed_pass]
        tally.add(in_layers, num_layers * layers, source)
        tally.add(in_ends, at_ends if has_ends else 0.0, source)
        self._add_exchanges(tally, timed_pass, load, num_layers)

    def _add_exchanges(self, tally: Tally, timed_pass: TimedPass, load: Load, num_layers: float) -> None:
        """Add the collectives and pipeline messages.

        These are two all-reduces a layer (and those of an adapter in a prefill, and of norms over all heads) and one of
        the embedding, the gather of the logits, the hidden states sent on and the sampled tokens sent back, and the
        all-to-alls around experts, in which all ranks wait for the busiest one.
        """
        groups, collectives, pp, number = self.groups, self._collectives, self.query.layout.pp, load.number
        hidden_bytes = load.mean_tokens * self._hidden_bytes
        if groups.tensor.size > 1:
            reduced, source = collectives.reduce(hidden_bytes)
            reductions = number * (2 * num_layers + 1) * reduced
            if (adapter := self.query.model.adapter) and timed_pass is TimedPass.PREFILL:
                between, _ = collectives.reduce(load.mean_tokens * adapter.rank * self.element_bytes)
                _, rows = self.query.model.adapter_exchanges
                reductions += number * num_layers * rows * between
            if self.query.model.whole_qk_norm:
                reductions += number * num_layers * collectives.reduce(load.mean_tokens * _SQUARES_BYTES)[0]
            tally.add("tensor-parallel collectives", reductions, source)
            gathered, source = collectives.gather(load.mean_rows * self._logits_bytes)
            tally.add("logits gather", number * gathered, source)
        model = self.query.model
        if model.experts and groups.experts.size > 1:
            copies, layout = model.experts.experts_per_token, self.query.layout
            busiest = model.experts.imbalance(load.mean_tokens * layout.expert_replicas, layout.ep)
            passed, source = collectives.route(busiest * copies * hidden_bytes / layout.fold_size)
            per_layer = 2 * model.expert_layers_share * passed
            tally.add("expert-parallel collectives", number * num_layers * per_layer, source)
        if pp > 1:
            sent, source = collectives.send(hidden_bytes)
            back, _ = collectives.send(load.mean_rows * _SAMPLED_BYTES)
            tally.add("pipeline messages", number * (sent + (pp - 1) * back), source)

    @cached_property
    def _collectives(self) -> _CollectiveSeconds:
        groups, seconds_of = self.groups, self.network.seconds_by_bytes
        return _CollectiveSeconds(
            reduce=seconds_of(ALL_REDUCE, groups.tensor),
            gather=seconds_of(ALL_GATHER, groups.tensor),
            route=seconds_of(ALL_TO_ALL, groups.experts),
            send=seconds_of(SEND_RECEIVE, groups.neighbours),
        )

    @cached_property
    def _layer_counts(self) -> LayerCounts[float]:
        return LayerCounts.of(self.query.model, self.query.layout.pp)

    @cached_property
    def _hidden_bytes(self) -> int:
        """Bytes of one token's hidden state."""
        return self.query.model.hidden_size * self.element_bytes

    @cached_property
    def _logits_bytes(self) -> int:
        """Bytes of the logits of one row."""
        return self.query.model.padded_vocab_size * self.element_bytes


class _CollectiveSeconds(NamedTuple):
    """The seconds of each collective of one layout as a function of its bytes."""

    reduce: SecondsByBytes
    gather: SecondsByBytes
    route: SecondsByBytes
    send: SecondsByBytes


def generation_work(
    rounds: Rounds,
    num_slots: int,
    pp: int,
    rows_per_prompt: float = 1,
    tool_prefills: Passes = (),
    *,
    max_tokens: int | None = None,
    draft_round: DraftRound = NO_DRAFTS,
    verifies_together: bool = False,
) -> Work:
    """Return the rounds as passes of the groups of a pipeline of `pp` stages.

    With drafts a decode step has a row for each token that a sequence verifies, and there are fewer steps. Each row
    reads the cache; with `verifies_together` the rows of a sequence read it once together.

    Prefills of more than `max_tokens` tokens are split. Of `rows_per_prompt` rows of one prompt the first to be
    admitted is prefilled; the others copy its keys and values, which is not costed. `tool_prefills` are prefills
    of tool results.
    """
    num_groups, loads = min(pp, num_slots), []
    rounds = rounds.with_drafts(draft_round.sampled)
    if rounds.windows:
        loads.append(
            (
                TimedPass.DECODE,
                _decode_load(rounds.windows, num_groups, pp, draft_round.verified, together=verifies_together),
            )
        )
    if rounds.first.calls or rounds.refills.calls:
        passes = [*tool_prefills, *_prefill_passes(_prefilled_prompts(rounds, rows_per_prompt), num_groups, pp)]
        loads.append(
            (TimedPass.PREFILL, _load([_split_pass(one, max_tokens) for one in passes] if max_tokens else passes))
        )
    tool_rounds = sum(number for number, *_ in tool_prefills)
    return Work(
        tuple(loads),
        rounds.num_busy * num_groups,
        rounds.num_sampled + (draft_round.verified - 1) * rounds.num_decoded,
        num_shared=rounds.num_shared + tool_rounds,
    )


def _without_shared(load: Load, num_shared: float) -> Load:
    """Return decode steps without those of one row for the rounds that also prefill."""
    *_, context = load.passes[0]
    return load._replace(passes=(*load.passes, (-num_shared, 1.0, 1.0, context))) if num_shared else load


def _decode_load(
    windows: Sequence[RoundWindow], num_groups: int, pp: int, rows_of_sequence: float, *, together: bool
) -> Load:
    """Return the decode passes: max(m, p) a round, with the live sequences spread over m groups.

    A sequence has `rows_of_sequence` rows. If they read its cache `together`, each row is costed as reading an equal
    part of it.
    """
    readers = rows_of_sequence if together else 1.0
    passes = []
    for rounds, decoding, context in windows:
        live = decoding if decoding > 1 else 1.0
        live_groups = num_groups if num_groups < live else live
        passes.append(
            (
                rounds * (live_groups if live_groups > pp else pp),
                live / live_groups * rows_of_sequence,
                1,
                context / readers,
            )
        )
    return _load(passes)


def _prefill_passes(rounds: Rounds, num_groups: int, pp: int) -> list[Pass]:
    """Return the prefills: prompts of the first round are spread over the groups, later ones fill one group."""
    first, refills = rounds.first, rounds.refills
    passes: list[Pass] = []
    if first.calls:
        passes.append((first.calls * pp, first.rows / min(num_groups, max(1, first.rows)), first.tokens, 0.0))
    if refills.calls:
        passes.append((refills.calls, refills.rows, refills.tokens, 0.0))
    return passes


def _split_pass(whole: Pass, max_tokens: int) -> Pass:
    """Return the pass split into equal passes of at most `max_tokens` tokens."""
    number, rows, tokens, context = whole
    parts = max(1, math.ceil(rows * tokens / max_tokens))
    return number * parts, rows / parts, tokens, context


def _prefilled_prompts(rounds: Rounds, rows_per_prompt: float) -> Rounds:
    """Return the rounds with prefilled prompts instead of admitted rows."""
    if rows_per_prompt == 1:
        return rounds
    first, refills = rounds.first, rounds.refills
    first_prompts = max(1.0, first.rows / rows_per_prompt) if first.calls else 0.0
    later_prompts = (
        first.calls * first.rows + refills.calls * refills.rows
    ) / rows_per_prompt - first.calls * first_prompts
    calls = min(refills.calls, later_prompts) if later_prompts > _NO_PROMPTS else 0.0
    refilled = refills._replace(calls=calls, rows=later_prompts / calls if calls else 0.0)
    return replace(rounds, first=first._replace(rows=first_prompts), refills=refilled)


def _load(passes: Passes) -> Load:
    total = total_rows = total_tokens = 0.0
    for number, rows, tokens, _ in passes:
        total += number
        total_rows += number * rows
        total_tokens += number * rows * tokens
    return Load(passes, total, total_rows / total, total_tokens / total)
