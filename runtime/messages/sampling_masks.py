"""Sampling masks in the experience: for each position of a sequence, the set of tokens that could be sampled next.

A set is int32 numbers of tokens in the order of the vocabulary. The sets of a row are stored one after another, with
the size of each; positions that predict no sampled token have an empty set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.profiles.stages import KEPT_COUNTS, KEPT_TOKENS, field_type
from meshwright.runtime.messages.experience import Experience

KEPT_BYTES = field_type(KEPT_TOKENS).num_bytes
"""Bytes of one token of a set."""


def put_sets(experience: Experience, row: int, sets: Sequence[bytes]) -> None:
    """Stores the set of each position of a row."""
    experience.put(KEPT_TOKENS, row, torch.frombuffer(bytearray(b"".join(sets)), dtype=torch.int32))
    counts = torch.tensor([len(one) // KEPT_BYTES for one in sets], dtype=torch.int32)
    experience.put(KEPT_COUNTS, row, counts)


def kept_sets(fields: Mapping[str, Mapping[int, Tensor]], row: int) -> list[bytes]:
    """The set of each position of a row of these fields, whose tensors are [N]; no sets where the row has none."""
    rows = fields.get(KEPT_TOKENS, {})
    return split_sets(rows[row], fields[KEPT_COUNTS][row]) if row in rows else []


def split_sets(tokens: Tensor, counts: Tensor) -> list[bytes]:
    """The sets of several positions, from their concatenated tokens [N] int32 and their sizes [T]."""
    return [one.numpy().tobytes() for one in tokens.split(counts.tolist())]


def padded_sets(experience: Experience, row: int) -> Tensor:
    """The sets of a row as [T, K] int32, with -1 behind those that are smaller than the largest."""
    tokens, counts = experience.get(KEPT_TOKENS, row), experience.get(KEPT_COUNTS, row)
    is_kept = torch.arange(int(counts.max())) < counts.unsqueeze(-1)
    return torch.full(is_kept.shape, -1, dtype=torch.int32).masked_scatter_(is_kept, tokens)


def concatenated_sets(rows: Sequence[Tensor]) -> Tensor:
    """The padded sets of several rows, [T_row, K_row] each, one after another as [T, K], where K is the largest."""
    width = max(row.shape[1] for row in rows)
    pads = [F.pad(row, (0, width - row.shape[1]), value=-1) for row in rows]
    return torch.cat(pads)
