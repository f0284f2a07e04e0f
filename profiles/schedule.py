"""How one stage runs on its layout: micro-batches, recomputation, offload, and how generation overlaps other work."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from meshwright.profiles.errors import BadInput


class Recompute(StrEnum):
    """Which activations a training stage drops and computes again in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"  # core attention only
    FULL = "full"  # whole layers


class Offload(StrEnum):
    """Which state of a stage waits in host memory while the stage does not run."""

    NONE = "none"
    WEIGHTS = "weights"  # of a role that is not trained: the host keeps a copy, so it is only read back
    OPTIMIZER = "optimizer"  # gradients, fp32 weights and moments: read before a training stage, written after it


class WhileWaiting(StrEnum):
    """What becomes of the keys and values of a sequence whose tool has not answered."""

    KEEP = "keep"  # and its slot with them
    LEAVE = "leave"  # another sequence gets both, and what is there is prefilled again behind the answer


@dataclass(frozen=True, order=True, kw_only=True)
class Schedule:
    """How a stage runs. A setting that does not concern the stage has its default.

    `micro_batch_size` counts sequences per data-parallel replica that go through the model together, at most; it is 0
    where `micro_batch_tokens` says instead how many tokens they have at most.
    `generation_slots` counts sequences in flight per data-parallel replica; it is 0 for stages that do not generate.
    `batches_in_flight` counts the prompt batches whose sequences may fill slots; batches are delivered in order.
    `overcommit` counts sequences in flight, over all replicas, beyond one batch: the first `batch_size` to end are
    delivered, the others go on. It excludes a `batches_in_flight` above 1.
    `chunk_tokens` is above 0 for a stage that reads responses while they are generated, in chunks of so many tokens.
    `while_waiting` concerns a generation of several turns.
    `rows` are dealt by speed where a stage runs on two kinds of nodes: of a batch, or of a minibatch where it trains,
    so many sequences go to the replicas on each kind together. It is empty where all replicas take as many.
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

    @model_serializer(mode="wrap")
    def _without_default(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Schedules are written as they were before there were rollouts of several turns, caps of tokens, and rows that
        are dealt by speed."""
        found: dict[str, Any] = written(self)
        if self.while_waiting is WhileWaiting.KEEP:
            del found["while_waiting"]
        if not self.micro_batch_tokens:
            del found["micro_batch_tokens"]
        if not self.rows:
            del found["rows"]
        return found

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least and not (name == "micro_batch_size" and self._is_capped):
                raise BadInput(f"{name}={getattr(self, name)} must be {least} or more.")
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
    def _is_capped(self) -> bool:
        return self.micro_batch_size == 0 and self.micro_batch_tokens > 0

    def most_tokens(self, longest: int) -> int:
        """Tokens of a micro-batch at most, of sequences of at most `longest`: what memory is proven for."""
        return self.micro_batch_tokens or self.micro_batch_size * longest

    @property
    def runs_on(self) -> bool:
        """Whether sequences of a generation stay in their slots from turn to turn."""
        return self.batches_in_flight > 1 or self.overcommit > 0


_LEAST = {
    "micro_batch_size": 1,
    "generation_slots": 0,
    "batches_in_flight": 1,
    "overcommit": 0,
    "chunk_tokens": 0,
    "micro_batch_tokens": 0,
}
"""The least value of each count."""
