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
from functools import cached_property

from meshwright.cost_models.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, SEND_RECEIVE, Groups, Network
from meshwright.cost_models.compute import Passes, Shard
from meshwright.cost_models.cost import Cost, Tally
from meshwright.cost_models.params import slowest_stage
from meshwright.cost_models.question import Call
from meshwright.cost_models.rounds import Rounds, Window
from meshwright.profiles.frameworks import Framework
from meshwright.profiles.table import Body

_DRAWN_BYTES = 16
"""A sampled token and its log-probability, both sent in fp64."""


_NAMES = {body: (f"{body.value} layers", f"{body.value} embedding and head") for body in (Body.DECODE, Body.PREFILL)}


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

    def _add(self, tally: Tally, body: Body, passes: Passes) -> None:
        """Adds passes of single groups; exchanges are costed at the mean pass, for they are linear in its size."""
        total = sum([number for number, _, _, _ in passes])
        total_rows = sum([number * rows for number, rows, _, _ in passes])
        total_tokens = sum([number * rows * tokens for number, rows, tokens, _ in passes])
        layers, at_ends, source = self.shard.total(body, passes)
        num_layers, has_ends = slowest_stage(self.call.model, self.call.layout.pp, layers, at_ends)
        in_layers, in_ends = _NAMES[body]
        tally.add(in_layers, num_layers * layers, source)
        tally.add(in_ends, at_ends if has_ends else 0.0, source)
        self._add_exchanges(tally, total, total_rows / total, total_tokens / total, num_layers)

    def _add_exchanges(self, tally: Tally, number: float, rows: float, tokens: float, num_layers: int) -> None:
        """Two reductions a layer and one of the embedding; the logits; the hidden state on, the drawn tokens back; and
        each token to its experts and back, in all replicas that share them at a time."""
        groups, network, pp = self.groups, self.network, self.call.layout.pp
        hidden_bytes = tokens * self._hidden_bytes
        if groups.tensor.size > 1:
            reduced, source = network.seconds(ALL_REDUCE, groups.tensor, hidden_bytes)
            tally.add("tensor-parallel collectives", number * (2 * num_layers + 1) * reduced, source)
            gathered, source = network.seconds(ALL_GATHER, groups.tensor, rows * self._logits_bytes)
            tally.add("logits gather", number * gathered, source)
        model = self.call.model
        if model.experts and groups.experts.size > 1:
            routed_bytes = model.experts.experts_per_token * hidden_bytes
            passed, source = network.seconds(ALL_TO_ALL, groups.experts, routed_bytes)
            per_layer = 2 * model.expert_layers_share * passed
            tally.add("expert-parallel collectives", number * num_layers * per_layer, source)
        if pp > 1:
            sent, source = network.seconds(SEND_RECEIVE, groups.neighbours, hidden_bytes)
            back, _ = network.seconds(SEND_RECEIVE, groups.neighbours, rows * _DRAWN_BYTES)
            tally.add("pipeline messages", number * (sent + (pp - 1) * back), source)

    @cached_property
    def _hidden_bytes(self) -> int:
        """Of one token between two layers."""
        return self.call.model.hidden_size * self.element_bytes

    @cached_property
    def _logits_bytes(self) -> int:
        """Of one row."""
        return self.call.model.padded_vocab_size * self.element_bytes


def _decode_passes(windows: Sequence[Window], num_groups: int, pp: int) -> list[tuple[float, float, float, float]]:
    """Each window's rounds: max(m, p) passes a round, the live sequences spread over m groups."""
    found: list[tuple[float, float, float, float]] = []
    for rounds, decoding, context in windows:
        live = max(decoding, 1.0)
        live_groups = num_groups if num_groups < live else live
        found.append((rounds * (live_groups if live_groups > pp else pp), live / live_groups, 1, context))
    return found


def _prefill_passes(rounds: Rounds, num_groups: int, pp: int) -> list[tuple[float, float, float, float]]:
    """What is admitted in the first round spreads over the groups; what is admitted later fills one."""
    first, refills = rounds.first, rounds.refills
    found: list[tuple[float, float, float, float]] = []
    if first.calls:
        found.append((first.calls * pp, first.rows / min(num_groups, max(1, first.rows)), first.tokens, 0))
    if refills.calls:
        found.append((refills.calls, refills.rows, refills.tokens, 0))
    return found
