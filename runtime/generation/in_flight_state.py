"""What is under way on a rank between two turns: experience of later steps, and sequences in flight.

It belongs to the plan and to how tokens are sampled: with the same, a run that is resumed goes on with it as if it had
not been stopped, with the same keys and values in the same slots. With others it is left behind and done again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from meshwright.runtime.generation.slots import LiveSequence, Prompt, Response


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A replica's sequences in flight, and this rank's keys and values of those that are live."""

    turn: int
    live: tuple[tuple[LiveSequence, ...], ...]
    """By group of slots, in the order of the slots."""
    waiting: tuple[Prompt, ...]
    ended: tuple[Response, ...]
    cached: tuple[tuple[Tensor, Tensor], ...]
    """Keys and values [layers, kv_heads, tokens, head_dim] of each live sequence, group by group."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Where the generation of a replica stands."""

    num_admitted: int
    """Of the replica's prompts from step 0 on."""
    mean_response_tokens: float
    batches_in_part: tuple[tuple[int, int, int], ...] = ()
    """Prompt batches that were not delivered whole: step, how many of the replica's were, and their tokens."""
    in_flight: InFlight | None


@dataclass(frozen=True, kw_only=True)
class Underway:
    """Of one rank. `experience` is by step, field and row; `drawing` is None on a rank that does not generate."""

    draws_by: str
    """The digest of what responses are drawn by: the plan, and how tokens are sampled."""
    num_steps: int
    """Of the run that wrote it: nothing was done for a later step."""
    experience: Mapping[int, Mapping[str, Mapping[int, Tensor]]]
    drawing: Drawing | None


def write_underway(directory: Path, rank: int, underway: Underway) -> None:
    """Into the directory of a checkpoint, to which every rank writes its own."""
    experience = {  # rows that came in one message are views of it, which would be saved with each
        step: {field: {row: values.clone() for row, values in rows.items()} for field, rows in fields.items()}
        for step, fields in underway.experience.items()
    }
    torch.save(replace(underway, experience=experience), _path(directory, rank))


def read_underway(directory: Path, rank: int, draws_by: str) -> Underway | None:
    """What the rank wrote; None if that was drawn by something else."""
    path = _path(directory, rank)
    if not path.exists():
        return None
    found: Underway = torch.load(path, weights_only=False)
    return found if found.draws_by == draws_by else None


def _path(directory: Path, rank: int) -> Path:
    return directory / f"underway-{rank:05d}.pt"
