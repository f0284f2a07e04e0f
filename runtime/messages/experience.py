"""The experience of one step as one rank holds it: fields of rows, and how they pass from rank to rank.

A row is one sequence. Each field of a row is a one-dimensional tensor on the host. Messages are safetensors bytes over
a gloo group, whatever the devices compute with; a field is one tensor there, its rows end to end, and what arrives is
not copied again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from meshwright.planner.program.program import Receive, Send
from meshwright.profiles.errors import RunFailed
from meshwright.profiles.packing import ReplicaDeal, deal, deal_by_tokens, share_in_order
from meshwright.profiles.schedule import Schedule
from meshwright.runtime.messages.packed_tensors import packed
from meshwright.runtime.messages.transport import Transport

_ROWS = ".rows"
"""After the name of a field: its rows' numbers and lengths, [2, R]."""

_STEP = "step"
"""Beside the fields of a message: the step that it is of."""

_DTYPES = {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "F32": torch.float32, "F64": torch.float64}
"""By their names in safetensors."""


class Experience:
    """Fields by row. What was put is not changed."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, Tensor]] = {}

    def put(self, field: str, row: int, values: Tensor) -> None:
        """Takes the values [N] of a field of a row; whoever puts them does not change them."""
        self._rows.setdefault(field, {})[row] = values

    def get(self, field: str, row: int) -> Tensor:
        """The values [N] that were put."""
        return self._rows[field][row]

    def rows(self, field: str) -> tuple[int, ...]:
        """The rows of which the field is held, ascending."""
        return tuple(sorted(self._rows.get(field, {})))

    def fields(self) -> Mapping[str, Mapping[int, Tensor]]:
        """All that is held, by field and row: [N] each."""
        return self._rows

    def padded(self, field: str, rows: Sequence[int], width: int) -> Tensor:
        """[len(rows), width], padded with zeros on the right."""
        first = self.get(field, rows[0])
        block = torch.zeros(len(rows), width, dtype=first.dtype)
        for index, row in enumerate(rows):
            values = self.get(field, row)
            block[index, : len(values)] = values
        return block

    def tensors(self, fields: Iterable[str], step: int) -> dict[str, Tensor]:
        """Rows held of these fields: by field [N] end to end, their numbers and lengths [2, R], and the step [1]."""
        found = {_STEP: torch.tensor([step])}
        for field in fields:
            if rows := self.rows(field):
                parts = [self.get(field, row) for row in rows]
                found[field] = torch.cat(parts)
                found[field + _ROWS] = torch.tensor([rows, [len(part) for part in parts]])
        return found

    def pack(self, fields: Iterable[str], step: int) -> Tensor:
        """All rows held of these fields, as bytes [N] uint8 that say of which step they are."""
        return torch.frombuffer(bytearray(packed(self.tensors(fields, step))), dtype=torch.uint8)

    def unpack(self, payload: Tensor) -> int:
        """Puts every row of a packed message [N] uint8, which the rows share; the step that the message is of."""
        return self.take(dict(_tensors(payload)))

    def take(self, tensors: Mapping[str, Tensor]) -> int:
        """Puts every row of what `tensors` gave, [N] by field, which the rows share; the step that it is of."""
        for field, values in tensors.items():
            if field != _STEP and not field.endswith(_ROWS):
                rows, lengths = tensors[field + _ROWS].view(2, -1).tolist()
                self._rows.setdefault(field, {}).update(zip(rows, values.split(lengths), strict=True))
        return int(tensors[_STEP])


def _tensors(payload: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views [N] of the tensors in safetensors bytes: a length of 8 bytes, a header in JSON, and the aligned data."""
    data = 8 + int(payload[:8].view(torch.int64))
    for name, told in json.loads(payload[8:data].numpy().tobytes()).items():
        begin, end = told["data_offsets"]
        yield name, payload[data + begin : data + end].view(_DTYPES[told["dtype"]])


class ExperienceTransport:
    """Carries packed experience between ranks; sends do not wait."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def send(self, instruction: Send, experience: Experience, tag: int, step: int) -> int:
        """Sends what this owner holds of a step to the other targets; returns the bytes sent."""
        targets = [rank for rank in instruction.targets if rank != self._transport.rank]
        if not targets:
            return 0
        payload = experience.pack(instruction.fields, step)
        for rank in targets:
            self._transport.send(payload, rank, tag)
        return len(payload) * len(targets)

    def expect(self, instruction: Receive, tag: int) -> None:
        """Makes room for what will be received, so that it can arrive before."""
        for rank in instruction.owners:
            if rank != self._transport.rank:
                self._transport.expect(rank, tag)

    def receive(self, instruction: Receive, experience: Experience, tag: int, step: int) -> int:
        """Waits for what every other owner sends of a step; returns the bytes received.

        Raises RunFailed for the experience of another step, which no rank would notice otherwise.
        """
        received = 0
        for rank in instruction.owners:
            if rank != self._transport.rank:
                payload = self._transport.receive(rank, tag)
                found = experience.unpack(payload)
                if found != step:
                    raise RunFailed(
                        f"step {step}: rank {rank} handed over what {instruction.producer} wrote for step {found}; "
                        "messages came in another order than they were sent: run again with --resume to go on from the "
                        "last checkpoint."
                    )
                received += len(payload)
        return received

    def flush(self) -> None:
        """Waits until everything sent has arrived."""
        self._transport.flush()


def dealt_share(rows: Sequence[int], lengths: Mapping[int, int], replica: int, deal_of: ReplicaDeal) -> tuple[int, ...]:
    """The rows of one replica, which have nearly as much work as another's: see `profiles.packing.ReplicaDeal`. Every
    rank that knows the lengths deals alike."""
    return tuple(rows[index] for index in deal_of.of([lengths[row] for row in rows])[replica])


def share(
    rows: Sequence[int], lengths: Mapping[int, int], replica: int, num_replicas: int, group_size: int = 1
) -> tuple[int, ...]:
    """The rows that one replica generates, in order of the prompt's length: see `profiles.packing.share_in_order`."""
    ordered = sorted(rows, key=lambda row: (lengths[row], row))
    return tuple(ordered[place] for place in share_in_order(len(rows), group_size, replica, num_replicas))


def micro_batches(rows: Sequence[int], lengths: Mapping[int, int], schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """The rows of each micro-batch, of at most so many rows or so many tokens as the schedule says."""
    mine, cap = [lengths[row] for row in rows], schedule.micro_batch_tokens
    dealt = deal_by_tokens(mine, cap) if cap else deal(mine, schedule.micro_batch_size)
    return tuple(tuple(rows[index] for index in indices) for indices in dealt)
