"""Seconds of continuous batching over the distribution of lengths.

A replica holds its slots in min(pp, slots) groups that are in flight together. In a round each group learns its last
tokens, admits prompts into free slots and draws one token for each live sequence, so a response of n tokens takes n
rounds, the first of which is its prefill. With m live groups a round takes max(m, p) x tau(group), because a group's
next token waits for its last one to leave the last stage (DESIGN.md; the bubble of a pipeline with fewer than p groups
is Narayanan et al., arXiv:2104.04473, section 2.2, with m < p).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from meshwright.cost_models.collectives import ALL_GATHER, ALL_REDUCE, SEND_RECEIVE, Groups, Network
from meshwright.cost_models.compute import Shard
from meshwright.cost_models.cost import Cost, Tally, least_trusted
from meshwright.cost_models.params import slowest_stage
from meshwright.cost_models.question import Call
from meshwright.cost_models.rounds import Rounds, Window
from meshwright.profiles.frameworks import Framework
from meshwright.profiles.table import Body

_DRAWN_BYTES = 16
"""A sampled token and its log-probability, both sent in fp64."""


_NAMES = {body: (f"{body.value} layers", f"{body.value} embedding and head") for body in (Body.DECODE, Body.PREFILL)}

_Passes: TypeAlias = tuple[float, float, float, float]
"""A number of passes of one group through one pipeline stage, its rows, their tokens and what is cached of each."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Seconds of `actor_generate` on one replica."""

    call: Call
    shard: Shard
    groups: Groups
    network: Network
    element_bytes: int
    framework: Framework

    def seconds(self, rounds: Rounds, num_slots: int) -> Cost:
        """Prefills and decode rounds; compute and collectives of the slowest pipeline stage; what the host adds."""
        pp, framework = self.call.layout.pp, self.framework
        num_groups = min(pp, num_slots)
        tally = Tally()
        if rounds.windows:
            self._add(tally, Body.DECODE, _decode_passes(rounds.windows, num_groups, pp))
        prefills = _prefill_passes(rounds, num_groups, pp)
        if prefills:
            self._add(tally, Body.PREFILL, prefills)
        scheduling = rounds.visits * num_groups * framework.round_seconds + rounds.drawn * framework.row_seconds
        tally.add("scheduling", scheduling)
        return tally.cost()

    def _add(self, tally: Tally, body: Body, passes: Sequence[_Passes]) -> None:
        """Adds passes of single groups; exchanges are costed at the mean pass, for they are linear in its size."""
        total = total_rows = total_tokens = layers = at_ends = 0.0
        known, time_of = None, self.shard.time
        for number, rows, tokens, context in passes:
            layer, ends, source = time_of(body, rows, tokens, context)
            layers += number * layer
            at_ends += number * ends
            total += number
            total_rows += number * rows
            total_tokens += number * rows * tokens
            if source is not known:
                known = least_trusted((known, source)) if known else source
        assert known
        num_layers, has_ends = slowest_stage(self.call.model, self.call.layout.pp, layers, at_ends)
        in_layers, in_ends = _NAMES[body]
        tally.add(in_layers, num_layers * layers, known)
        tally.add(in_ends, at_ends if has_ends else 0.0, known)
        self._add_exchanges(tally, total, total_rows / total, total_tokens / total, num_layers)

    def _add_exchanges(self, tally: Tally, number: float, rows: float, tokens: float, num_layers: int) -> None:
        """Two reductions a layer and one of the embedding; the logits; the hidden state on, the drawn tokens back."""
        model, pp, size = self.call.model, self.call.layout.pp, self.element_bytes
        hidden_bytes = tokens * model.hidden_size * size
        if self.groups.tensor.size > 1:
            reduced, source = self.network.seconds(ALL_REDUCE, self.groups.tensor, hidden_bytes)
            tally.add("tensor-parallel collectives", number * (2 * num_layers + 1) * reduced, source)
            logits_bytes = rows * model.padded_vocab_size * size
            gathered, source = self.network.seconds(ALL_GATHER, self.groups.tensor, logits_bytes)
            tally.add("logits gather", number * gathered, source)
        if pp > 1:
            sent, source = self.network.seconds(SEND_RECEIVE, self.groups.neighbours, hidden_bytes)
            back, _ = self.network.seconds(SEND_RECEIVE, self.groups.neighbours, rows * _DRAWN_BYTES)
            tally.add("pipeline messages", number * (sent + (pp - 1) * back), source)


def _decode_passes(windows: Sequence[Window], num_groups: int, pp: int) -> list[_Passes]:
    """Each window's rounds: max(m, p) passes a round, the live sequences spread over m groups."""
    found: list[_Passes] = []
    for rounds, decoding, context in windows:
        live = max(decoding, 1.0)
        live_groups = num_groups if num_groups < live else live
        found.append((rounds * (live_groups if live_groups > pp else pp), live / live_groups, 1, context))
    return found


def _prefill_passes(rounds: Rounds, num_groups: int, pp: int) -> list[_Passes]:
    """What is admitted in the first round spreads over the groups; what is admitted later fills one."""
    first, refills = rounds.first, rounds.refills
    found: list[_Passes] = []
    if first.calls:
        found.append((first.calls * pp, first.rows / min(num_groups, max(1, first.rows)), first.tokens, 0))
    if refills.calls:
        found.append((refills.calls, refills.rows, refills.tokens, 0))
    return found
