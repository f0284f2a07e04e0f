"""The schedule of a stage: micro-batches, recomputation, offload, and the slots and batches in flight of generation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshwright.profiles.errors import BadInput


class Recompute(StrEnum):
    """Activations that a training stage drops and recomputes in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"  # core attention only
    FULL = "full"  # whole layers


class Offload(StrEnum):
    """State of a stage that is kept in host memory while the stage does not run."""

    NONE = "none"
    WEIGHTS = "weights"  # of an untrained role: the host keeps a copy, so they are only loaded
    OPTIMIZER = "optimizer"  # gradients, fp32 weights and moments: loaded before a training stage, stored after it


class WhileWaiting(StrEnum):
    """Treatment of the KV cache of a sequence that waits for its tool."""

    KEEP = "keep"  # the sequence keeps its KV blocks and its slot
    LEAVE = "leave"  # both are freed, and the sequence is prefilled again after the tool result


@dataclass(frozen=True, order=True, kw_only=True)
class Schedule:
    """The schedule of a stage. Settings that do not concern the stage have their default.

    `micro_batch_size`: maximum number of sequences of a micro-batch on each data-parallel replica; 0 if
    `micro_batch_tokens` bounds the tokens of a micro-batch instead.
    `generation_slots`: sequences that decode at a time on each data-parallel replica; 0 if the stage does not generate.
    `batches_in_flight`: prompt batches whose sequences may fill slots; batches are delivered in order.
    `overcommit`: sequences in flight beyond one batch, over all replicas. The first sequences to finish, as many
    as a batch has, are delivered, and the others continue. It excludes `batches_in_flight` above 1.
    `chunk_tokens`: size of the chunks in which a stage reads responses while they are generated; 0 if it does not.
    `while_waiting`: treatment of sequences that wait for a tool, in multi-turn rollouts.
    `draft_tokens`: tokens that are drafted for each sequence in a decode round, which verifies them (speculative
    decoding); 0 if rounds sample one token of each.
    `rows`: for a stage on two kinds of nodes, the sequences of a batch (of a minibatch, if it trains) that go to the
    replicas on each kind together. Empty if all replicas have equally many.
    """

    micro_batch_size: int = 1
    recompute: Recompute = Recompute.NONE
    generation_slots: int = 0
    batches_in_flight: int = 1
    overcommit: int = 0
    chunk_tokens: int = 0
    offload: Offload = Offload.NONE
    while_waiting: WhileWaiting = WhileWaiting.KEEP
    micro_batch_tokens: int = 0
    rows: tuple[int, ...] = ()
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        for name, minimum in _MINIMA.items():
            if getattr(self, name) < minimum and not (name == "micro_batch_size" and self._has_token_limit):
                raise BadInput(f"{name}={getattr(self, name)} must be {minimum} or more.")
        if any(number < 1 for number in self.rows):
            raise BadInput(f"rows={list(self.rows)} leaves a kind of nodes without any; give each 1 or more.")
        if self.micro_batch_tokens and self.micro_batch_size:
            raise BadInput(
                f"micro_batch_tokens={self.micro_batch_tokens} with micro_batch_size={self.micro_batch_size}; set one "
                "of them, and the other to 0."
            )
        if self.overcommit and self.batches_in_flight > 1:
            raise BadInput(
                f"overcommit={self.overcommit} with batches_in_flight={self.batches_in_flight}; set one of them."
            )

    @property
    def _has_token_limit(self) -> bool:
        return self.micro_batch_size == 0 and self.micro_batch_tokens > 0

    def max_tokens(self, longest: int) -> int:
        """Return the maximum number of tokens of a micro-batch whose sequences have at most `longest` tokens."""
        return self.micro_batch_tokens or self.micro_batch_size * longest

    @property
    def is_recomputed(self) -> bool:
        """True if whole layers are recomputed."""
        return self.recompute is Recompute.FULL

    @property
    def is_attention_recomputed(self) -> bool:
        """True if core attention alone is recomputed."""
        return self.recompute is Recompute.SELECTIVE

    @property
    def keeps_in_flight(self) -> bool:
        """True if sequences stay in flight from one period of the steady state to the next."""
        return self.batches_in_flight > 1 or self.overcommit > 0


_MINIMA = {
    "micro_batch_size": 1,
    "generation_slots": 0,
    "batches_in_flight": 1,
    "overcommit": 0,
    "chunk_tokens": 0,
    "micro_batch_tokens": 0,
    "draft_tokens": 0,
}
"""The minimum of each count."""
