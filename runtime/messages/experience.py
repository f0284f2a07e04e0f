"""The experience of one step on one rank, and its transfer between ranks.

Experience is fields by row: a row is one sequence, and each field of a row is a one-dimensional tensor on the host.
Messages are safetensors bytes over a gloo group, on any device; each field is one tensor in them, its rows
concatenated, and received tensors are views of the message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from meshwright.planner.program.program import Receive, Send
from meshwright.profiles.errors import RunFailed
from meshwright.profiles.packing import ReplicaAssignment, micro_batches_by_rows, micro_batches_by_tokens, replica_rows
from meshwright.profiles.schedule import Schedule
from meshwright.runtime.messages.packed_tensors import safetensors_bytes
from meshwright.runtime.messages.transport import Transport

_ROWS = ".rows"
"""Suffix of the tensor that has the numbers and lengths of a field's rows, [2, R]."""

_STEP = "step"
"""Name of the tensor that has the step of a message, [1]."""

_DTYPES = {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "F32": torch.float32, "F64": torch.float64}
"""Dtypes by their names in safetensors."""


class Experience:
    """Fields of rows. Tensors that were put are never changed."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, Tensor]] = {}

    def put(self, field: str, row: int, values: Tensor) -> None:
        """Stores the values [N] of a field of a row; the caller must not change them afterwards."""
        self._rows.setdefault(field, {})[row] = values

    def get(self, field: str, row: int) -> Tensor:
        """The values [N] of a field of a row."""
        return self._rows[field][row]

    def rows(self, field: str) -> tuple[int, ...]:
        """The rows that have the field on this rank, ascending."""
        return tuple(sorted(self._rows.get(field, {})))

    def fields(self) -> Mapping[str, Mapping[int, Tensor]]:
        """All values on this rank, by field and row: [N] each."""
        return self._rows

    def padded(self, field: str, rows: Sequence[int], width: int) -> Tensor:
        """A field of these rows as [len(rows), width], padded with zeros on the right."""
        first = self.get(field, rows[0])
        padded = torch.zeros(len(rows), width, dtype=first.dtype)
        for index, row in enumerate(rows):
            values = self.get(field, row)
            padded[index, : len(values)] = values
        return padded

    def to_tensors(self, fields: Iterable[str], step: int) -> dict[str, Tensor]:
        """The tensors of a message: each field [N] of all its rows concatenated, their numbers and lengths [2, R], and
        the step [1]."""
        tensors = {_STEP: torch.tensor([step])}
        for field in fields:
            if rows := self.rows(field):
                values = [self.get(field, row) for row in rows]
                tensors[field] = torch.cat(values)
                tensors[field + _ROWS] = torch.tensor([rows, [len(row_values) for row_values in values]])
        return tensors

    def pack(self, fields: Iterable[str], step: int) -> Tensor:
        """Packs all rows of these fields and the step into a message [N] uint8."""
        return torch.frombuffer(bytearray(safetensors_bytes(self.to_tensors(fields, step))), dtype=torch.uint8)

    def unpack(self, payload: Tensor) -> int:
        """Stores every row of a packed message [N] uint8, as views of it; returns the step of the message."""
        return self.put_tensors(dict(_tensors(payload)))

    def put_tensors(self, tensors: Mapping[str, Tensor]) -> int:
        """Stores every row of the result of `tensors`, as views of its [N] per field; returns its step."""
        for field, values in tensors.items():
            if field != _STEP and not field.endswith(_ROWS):
                rows, lengths = tensors[field + _ROWS].view(2, -1).tolist()
                self._rows.setdefault(field, {}).update(zip(rows, values.split(lengths), strict=True))
        return int(tensors[_STEP])


def _tensors(payload: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views [N] of the tensors in safetensors bytes: a length of 8 bytes, a header in JSON, and the aligned data."""
    data = 8 + int(payload[:8].view(torch.int64))
    for name, header in json.loads(payload[8:data].numpy().tobytes()).items():
        begin, end = header["data_offsets"]
        yield name, payload[data + begin : data + end].view(_DTYPES[header["dtype"]])


class ExperienceTransport:
    """Sends and receives packed experience; sends do not wait."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def send(self, instruction: Send, experience: Experience, tag: int, step: int) -> int:
        """Sends this owner's rows of a step to the other targets; returns the bytes sent."""
        targets = [rank for rank in instruction.targets if rank != self._transport.rank]
        if not targets:
            return 0
        payload = experience.pack(instruction.fields, step)
        for rank in targets:
            self._transport.send(payload, rank, tag)
        return len(payload) * len(targets)

    def post_receive(self, instruction: Receive, tag: int) -> None:
        """Posts the receives of an instruction early, so that messages can arrive before they are waited for."""
        for rank in instruction.owners:
            if rank != self._transport.rank:
                self._transport.post_receive(rank, tag)

    def receive(self, instruction: Receive, experience: Experience, tag: int, step: int) -> int:
        """Waits for the rows of a step from every other owner; returns the bytes received.

        Raises RunFailed for the experience of another step, which would otherwise go unnoticed.
        """
        received = 0
        for rank in instruction.owners:
            if rank != self._transport.rank:
                payload = self._transport.receive(rank, tag)
                received_step = experience.unpack(payload)
                if received_step != step:
                    raise RunFailed(
                        f"step {step}: rank {rank} sent the output of {instruction.producer} for step {received_step}; "
                        "messages arrived out of order: run again with --resume to go on from the last checkpoint."
                    )
                received += len(payload)
        return received

    def flush(self) -> None:
        """Waits until all sent messages have arrived."""
        self._transport.flush()


def assigned_rows(
    rows: Sequence[int], lengths: Mapping[int, int], replica: int, split: ReplicaAssignment
) -> tuple[int, ...]:
    """The rows of one replica, with nearly as much work as every other's: see `profiles.packing.ReplicaDeal`.

    Every rank that has the lengths computes the same split.
    """
    return tuple(rows[index] for index in split.assign([lengths[row] for row in rows])[replica])


def generation_rows(
    rows: Sequence[int], lengths: Mapping[int, int], replica: int, num_replicas: int, group_size: int = 1
) -> tuple[int, ...]:
    """The rows that one replica generates, in the order of prompt lengths: see `profiles.packing.share_in_order`."""
    ordered = sorted(rows, key=lambda row: (lengths[row], row))
    return tuple(ordered[index] for index in replica_rows(len(rows), group_size, replica, num_replicas))


def micro_batches(rows: Sequence[int], lengths: Mapping[int, int], schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """The rows of each micro-batch, within the schedule's limit on rows or tokens of a micro-batch."""
    row_lengths, max_tokens = [lengths[row] for row in rows], schedule.micro_batch_tokens
    batches = (
        micro_batches_by_tokens(row_lengths, max_tokens)
        if max_tokens
        else micro_batches_by_rows(row_lengths, schedule.micro_batch_size)
    )
    return tuple(tuple(rows[index] for index in indices) for indices in batches)
