"""The experience of one step on one rank, its transfer between ranks, and the batch that it belongs to.

Experience is fields by row: a row is one sequence, and each field of a row is a one-dimensional tensor on the host.
Messages are safetensors bytes over a gloo group, on any device; each field is one tensor in them, its rows
concatenated, and received tensors are views of the message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from safetensors.numpy import save
from torch import Tensor

from meshwright.planner.program.program import Receive, Send
from meshwright.profiles.errors import RunFailed
from meshwright.profiles.stages import REWARDS, SCORE_SIZES, SEQUENCE_DIGESTS, TOOL_TOKEN_VERSION, TOTAL_SCORES
from meshwright.runtime.messages.transport import Transport


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The safetensors bytes of tensors [...] by name, of dtypes that numpy has, with `metadata` in the header."""
    arrays = {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
    content: bytes = save(arrays, metadata and dict(metadata))
    return content


_ROWS = ".rows"
"""Suffix of the tensor that has the numbers and lengths of a field's rows, [2, R]."""

_STEP = "step"
"""Name of the tensor that has the step of a message, [1]."""

_DTYPES = {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "F32": torch.float32, "F64": torch.float64}
"""Dtypes by their names in safetensors."""


class Experience:
    """The fields of rows on one rank. A tensor is never changed once it has been put."""

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
        for name in fields:
            if rows := self.rows(name):
                values = [self.get(name, row) for row in rows]
                tensors[name] = torch.cat(values)
                tensors[name + _ROWS] = torch.tensor([rows, [len(row_values) for row_values in values]])
        return tensors

    def pack(self, fields: Iterable[str], step: int) -> Tensor:
        """Packs all rows of these fields and the step into a message [N] uint8."""
        return torch.frombuffer(bytearray(safetensors_bytes(self.to_tensors(fields, step))), dtype=torch.uint8)

    def unpack(self, payload: Tensor) -> int:
        """Stores every row of a packed message [N] uint8, as views of it; returns the step of the message."""
        return self.put_tensors(dict(_tensors(payload)))

    def put_tensors(self, tensors: Mapping[str, Tensor]) -> int:
        """Stores every row of the result of `to_tensors`, as views of its tensors [N]; returns its step."""
        for name, values in tensors.items():
            if name != _STEP and not name.endswith(_ROWS):
                rows, lengths = tensors[name + _ROWS].view(2, -1).tolist()
                self._rows.setdefault(name, {}).update(zip(rows, values.split(lengths), strict=True))
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


@dataclass(frozen=True, kw_only=True)
class StepExperience:
    """A batch whose experience is filled as the stages of its step write it.

    A held-out batch, of the set `held_out`, is scored and never trained on. Some groups of a wave of dynamic sampling
    are trained on, as rows of another batch, whose `selection` has the metrics of all samples that they were selected
    from.
    """

    step: int
    rows: range
    held_out: str = ""
    is_wave: bool = False
    experience: Experience = field(default_factory=Experience)
    selection: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> int:
        """The step, or a negative key for a held-out batch or a wave, of which there is one at a time."""
        if self.is_wave:
            return -2
        return -1 if self.held_out else self.step

    def prompt_length(self, row: int) -> int:
        """Number of tokens of the prompt."""
        return int(self.experience.get("prompt_lengths", row))

    def length(self, row: int) -> int:
        """Number of tokens of prompt and response together."""
        return len(self.experience.get("tokens", row))

    def score(self, row: int) -> Tensor:
        """The score of a sequence [1]: the total of all rewards if there is one, else the reward model's score."""
        totals = self.experience.fields().get(TOTAL_SCORES, {})
        return totals[row] if row in totals else self.experience.get("scores", row)

    def score_size(self, row: int) -> Tensor:
        """The magnitude of the largest term of a sequence's score [1], which decides the score's rounding error."""
        sizes = self.experience.fields().get(SCORE_SIZES, {})
        return sizes[row] if row in sizes else self.score(row).abs()

    def sampled_values(self, field: str, row: int) -> Tensor:
        """The values [N] of a per-token field at the positions that predict sampled tokens, not tool tokens."""
        first = self.prompt_length(row) - 1
        values, versions = (self.experience.get(name, row)[first:-1] for name in (field, "versions"))
        return values[versions != TOOL_TOKEN_VERSION]

    def share_scores_of_duplicates(self) -> None:
        """Gives identical sequences the same reward model score, that of the first of them.

        Their scores from different micro-batches differ by rounding, which is large in low precision and for scores
        near zero, and must not become an advantage.
        """
        scores = self.experience.fields().get("scores", {})
        score_of_digest: dict[int, Tensor] = {}
        for row in sorted(scores):
            self.experience.put("scores", row, score_of_digest.setdefault(self._digest(row), scores[row]))

    def _digest(self, row: int) -> int:
        digests = self.experience.fields().get(SEQUENCE_DIGESTS, {})
        return int(digests[row]) if row in digests else digest_of(self.experience.get("tokens", row))

    def sum_rewards(self, weights: Sequence[float], model_weight: float) -> None:
        """Sets the total score of every sequence: the weighted sum of its host rewards and of the reward model's score,
        if it has one."""
        scores = self.experience.fields().get("scores", {})
        for row in self.rows:
            terms = self.experience.get(REWARDS, row).double() * torch.tensor(weights, dtype=torch.float64)
            if row in scores:
                terms = torch.cat([terms, model_weight * scores[row].double()])
            self.experience.put(TOTAL_SCORES, row, terms.sum().view(1).float())
            self.experience.put(SCORE_SIZES, row, terms.abs().max().view(1).float())

    def lengths(self) -> dict[int, int]:
        """Number of tokens of every row; this rank must have the tokens of all rows."""
        return {row: self.length(row) for row in self.rows}


def digest_of(tokens: Tensor) -> int:
    """A 63-bit hash of tokens [N]."""
    return int.from_bytes(hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).digest()) >> 1
