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
from typing import NamedTuple

from meshwright.cost_models.collectives import ALL_GATHER, ALL_REDUCE, SEND_RECEIVE, Groups, Network
from meshwright.cost_models.compute import Shard
from meshwright.cost_models.cost import Cost, Tally, least_trusted
from meshwright.cost_models.question import Call
from meshwright.cost_models.rounds import Rounds, Window
from meshwright.profiles.frameworks import Framework
from meshwright.profiles.table import Body

_DRAWN_BYTES = 16
"""A sampled token and its log-probability, both sent in fp64."""


class _Passes(NamedTuple):
    """`number` passes of one group of `rows` rows through one pipeline stage."""

    number: float
    rows: float
    tokens: float
    context: float


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
        pp = self.call.layout.pp
        num_groups = min(pp, num_slots)
        decodes = [_decode_passes(window, num_groups, pp) for window in rounds.windows]
        first, refills = rounds.first, rounds.refills
        prefills = (
            [_Passes(first.calls * pp, first.rows / min(num_groups, max(1, first.rows)), first.tokens, 0)]
            if first.calls
            else []
        )
        if refills.calls:
            prefills.append(_Passes(refills.calls, refills.rows, refills.tokens, 0))
        tally = Tally()
        if decodes:
            self._add(tally, Body.DECODE, decodes)
        if prefills:
            self._add(tally, Body.PREFILL, prefills)
        tally.add("scheduling", self._host_seconds(rounds, num_slots))
        return tally.cost()

    def _host_seconds(self, rounds: Rounds, num_slots: int) -> float:
        """Scheduling of each group in flight, and handing each sequence its token, in rounds of their own."""
        framework = self.framework
        visits = rounds.first.calls + sum(window.rounds for window in rounds.windows)
        drawn = rounds.first.calls * rounds.first.rows + sum(w.rounds * w.live for w in rounds.windows)
        groups = min(self.call.layout.pp, num_slots)
        return visits * groups * framework.round_seconds + drawn * framework.row_seconds

    def _add(self, tally: Tally, body: Body, passes: Sequence[_Passes]) -> None:
        """Adds passes of single groups; exchanges are costed at the mean pass, for they are linear in its size."""
        model = self.call.model
        num_layers = model.num_layers / self.call.layout.pp
        total = total_rows = total_tokens = layer = ends = 0.0
        sources = set()
        for number, rows, tokens, context in passes:
            time = self.shard.time(body, rows, tokens, context)
            layer += number * time.layer
            ends += number * time.ends
            total += number
            total_rows += number * rows
            total_tokens += number * rows * tokens
            sources.add(time.source)
        source = least_trusted(sources)
        tally.add(f"{body.value} layers", num_layers * layer, source)
        tally.add(f"{body.value} embedding and head", ends, source)
        self._add_exchanges(tally, total, total_rows / total, total_tokens / total)

    def _add_exchanges(self, tally: Tally, number: float, rows: float, tokens: float) -> None:
        """Two reductions a layer and one of the embedding; the logits; the hidden state on, the drawn tokens back."""
        model, pp, size = self.call.model, self.call.layout.pp, self.element_bytes
        hidden_bytes = tokens * model.hidden_size * size
        if self.groups.tensor.size > 1:
            reduced, source = self.network.seconds(ALL_REDUCE, self.groups.tensor, hidden_bytes)
            tally.add("tensor-parallel collectives", number * (2 * model.num_layers / pp + 1) * reduced, source)
            logits_bytes = rows * model.padded_vocab_size * size
            gathered, source = self.network.seconds(ALL_GATHER, self.groups.tensor, logits_bytes)
            tally.add("logits gather", number * gathered, source)
        if pp > 1:
            sent, source = self.network.seconds(SEND_RECEIVE, self.groups.neighbours, hidden_bytes)
            back, _ = self.network.seconds(SEND_RECEIVE, self.groups.neighbours, rows * _DRAWN_BYTES)
            tally.add("pipeline messages", number * (sent + (pp - 1) * back), source)


def _decode_passes(window: Window, num_groups: int, pp: int) -> _Passes:
    """A window's rounds: max(m, p) passes a round, the live sequences spread over m groups."""
    live = max(1.0, window.live)
    live_groups = min(num_groups, live)
    return _Passes(window.rounds * max(live_groups, pp), live / live_groups, 1, window.context)
