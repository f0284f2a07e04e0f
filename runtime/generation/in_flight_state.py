"""What is under way on a rank between two turns: experience of later steps, and sequences in flight.

It belongs to the plan and to how tokens are sampled: with the same, a run that is resumed goes on with it as if it had
not been stopped, with the same keys and values in the same slots. With another plan the tokens alone are taken over, as
`carrying` says.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.profiles.documents import write_bytes_atomically
from meshwright.profiles.errors import BadInput
from meshwright.profiles.values import json_value, require_file
from meshwright.runtime.generation.slots import Beginning, Finish, Partial, Prompt, Response
from meshwright.runtime.messages.packed_tensors import packed

_FORMAT, _TOLD = "meshwright underway 3", "underway"
"""Of the files, and the key of their metadata."""
_MOST_BYTES = 2**42
_CACHED = "cached/"
"""Before the names of keys and values."""


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A replica's sequences in flight, and this rank's keys and values of those that are live."""

    turn: int
    live: tuple[tuple[Partial, ...], ...]
    """By group of slots, in the order in which they took them."""
    paused: tuple[Partial, ...]
    """Those that gave way to others, the oldest first."""
    waiting: tuple[Prompt, ...]
    ended: tuple[Response, ...]
    blocks: tuple[tuple[int, ...], ...]
    """Of the cache, that each live sequence holds, group by group: sums over them depend on nothing else."""
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
    begun: Mapping[int, Beginning] = field(default_factory=dict)
    """By draw, of prompts that wait or are not admitted yet: what was drawn for them under another plan."""
    delivered: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    """Of steps that are not trained yet, by row the draw of what was delivered."""
    left: tuple[int, ...] = ()
    """The draws of the replica's prompts before the step `until` that are not admitted."""
    until: int = 0
    num_dealt: int = 0
    """Prompts that waves of dynamic sampling were dealt since step 0."""


class DrawsBy(NamedTuple):
    """Digests of what responses are drawn by. With the same plan and sampling a run goes on with all that is under way;
    with another plan, with the tokens that were drawn."""

    plan: str
    sampling: str


@dataclass(frozen=True, kw_only=True)
class Underway:
    """Of one rank. `experience` is by step, field and row; `drawing` is None on a rank that does not generate."""

    draws_by: DrawsBy
    num_steps: int
    """Of the run that wrote it: nothing was done for a later step."""
    experience: Mapping[int, Mapping[str, Mapping[int, Tensor]]]
    drawing: Drawing | None
    dealt_again: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By step, the draws of batches that are not as the seed deals them."""


def packed_underway(underway: Underway) -> bytes:
    """What one rank has under way as safetensors, whose metadata says as JSON what is no list of numbers."""
    tensors: dict[str, Tensor] = {}
    for step, fields in underway.experience.items():
        for kind, rows in fields.items():
            name = f"experience/{step}/{kind}"
            tensors[name] = torch.cat(tuple(rows.values()))
            tensors[f"{name}/rows"] = torch.tensor([[*rows], [*map(len, rows.values())]])
    told: dict[str, Any] = {
        "format": _FORMAT,
        "draws_by": underway.draws_by,
        "num_steps": underway.num_steps,
        "dealt_again": underway.dealt_again,
        "drawing": None,
    }
    if drawing := underway.drawing:
        told["drawing"] = {
            "num_admitted": drawing.num_admitted,
            "mean_response_tokens": drawing.mean_response_tokens,
            "batches_in_part": drawing.batches_in_part,
            "in_flight": drawing.in_flight and _pack(drawing.in_flight, tensors),
            "begun": [(draw, one.finish and one.finish.value) for draw, one in drawing.begun.items()],
            "delivered": drawing.delivered,
            "left": drawing.left,
            "until": drawing.until,
            "num_dealt": drawing.num_dealt,
        }
        _pack_drawn("begun", list(drawing.begun.values()), tensors)
    return packed(tensors, {_TOLD: json.dumps(told)})


def write_underway(directory: Path, rank: int, content: bytes) -> None:
    """What was packed into the directory of a checkpoint, to which every rank writes its own."""
    write_bytes_atomically(_path(directory, rank), content)


def read_underway(directory: Path, rank: int, draws_by: DrawsBy) -> Underway | None:
    """What the rank wrote; None if that was drawn by something else. Raises BadInput for a file of another kind."""
    path = _path(directory, rank)
    return _read(path, draws_by) if path.exists() else None


def read_all_underway(directory: Path) -> tuple[Underway, ...]:
    """What every rank wrote, by whatever plan, but for keys and values. Raises BadInput for a file of another kind."""
    found = (_read(path, None) for path in sorted(directory.glob("underway-*.safetensors")))
    return tuple(one for one in found if one is not None)


def _read(path: Path, draws_by: DrawsBy | None) -> Underway | None:
    """As `read_underway`, and whatever it was drawn by, without keys and values, where that is not said."""
    require_file(path, "sequences in flight", _MOST_BYTES)
    try:
        with safe_open(path, framework="pt") as file:
            told = json_value((file.metadata() or {})[_TOLD], f"{path}")
            if told["format"] != _FORMAT:
                raise BadInput(f"{path} is {told['format']!r} and not {_FORMAT!r}; remove it, and it is drawn again.")
            if draws_by not in (None, DrawsBy(*told["draws_by"])):
                return None
            wanted = [name for name in file.keys() if draws_by or not name.startswith(_CACHED)]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in wanted}
        return _underway(told, tensors)
    except (OSError, SafetensorError, LookupError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        raise BadInput(
            f"{path} holds no sequences in flight that can be read ({type(error).__name__}: {error}); remove it, and "
            "they are drawn again."
        ) from None


def _underway(told: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Underway:
    experience: dict[int, dict[str, dict[int, Tensor]]] = {}
    for name, values in tensors.items():
        part, step, kind, *more = name.split("/")
        if part == "experience" and not more:
            rows, lengths = tensors[f"{name}/rows"].tolist()
            parts = (part.clone() for part in values.split(lengths))
            experience.setdefault(int(step), {})[kind] = dict(zip(rows, parts, strict=True))
    known, drawing = told["drawing"], None
    if known is not None:
        drawing = Drawing(
            num_admitted=known["num_admitted"],
            mean_response_tokens=known["mean_response_tokens"],
            batches_in_part=tuple((step, number, tokens) for step, number, tokens in known["batches_in_part"]),
            in_flight=known["in_flight"] and _unpack(known["in_flight"], tensors),
            begun=dict(_begun(known["begun"], tensors)),
            delivered={int(s): {int(row): draw for row, draw in d.items()} for s, d in known["delivered"].items()},
            left=tuple(known["left"]),
            until=known["until"],
            num_dealt=known.get("num_dealt", 0),  # there were no waves before it was written
        )
    return Underway(
        draws_by=DrawsBy(*told["draws_by"]),
        num_steps=told["num_steps"],
        experience=experience,
        drawing=drawing,
        dealt_again={int(step): tuple(draws) for step, draws in told["dealt_again"].items()},
    )


def _begun(told: Sequence[tuple[int, str | None]], tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Beginning]]:
    for (draw, finish), (_, drawn) in zip(told, _drawn("begun", tensors), strict=True):
        yield draw, Beginning(**drawn, finish=Finish(finish) if finish else None)


def _pack(found: InFlight, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Puts the lists of numbers of what is in flight to the tensors; returns the rest."""
    live = [sequence for group in found.live for sequence in group]
    for number, (keys, values) in enumerate(found.cached):
        tensors[f"{_CACHED}{number}/keys"], tensors[f"{_CACHED}{number}/values"] = keys, values
    _pack_prompts("live", [one.prompt for one in live], tensors)
    _pack_drawn("live", live, tensors)
    _pack_prompts("paused", [one.prompt for one in found.paused], tensors)
    _pack_drawn("paused", found.paused, tensors)
    _pack_prompts("waiting", found.waiting, tensors)
    _pack_prompts("ended", [one.prompt for one in found.ended], tensors)
    _pack_drawn("ended", found.ended, tensors)
    return {
        "turn": found.turn,
        "groups": [len(group) for group in found.live],
        "blocks": found.blocks,
        "finishes": [response.finish.value for response in found.ended],
    }


def _unpack(told: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> InFlight:
    sequences = iter(_partials("live", tensors))
    responses = (
        Response(**vars(partial), finish=Finish(finish))
        for partial, finish in zip(_partials("ended", tensors), told["finishes"], strict=True)
    )
    numbers = range(len(told["blocks"]) if f"{_CACHED}0/keys" in tensors else 0)
    return InFlight(
        turn=told["turn"],
        live=tuple(tuple(itertools.islice(sequences, size)) for size in told["groups"]),
        paused=tuple(_partials("paused", tensors)),
        waiting=tuple(_prompts("waiting", tensors)),
        ended=tuple(responses),
        blocks=tuple(map(tuple, told["blocks"])),
        cached=tuple((tensors[f"{_CACHED}{number}/keys"], tensors[f"{_CACHED}{number}/values"]) for number in numbers),
    )


def _pack_prompts(name: str, prompts: Sequence[Prompt], tensors: dict[str, Tensor]) -> None:
    """Numbers [5, P] of the prompts, and their tokens end to end; no limit to the response is -1."""
    facts = [(p.row, p.draw, p.step, -1 if p.max_response is None else p.max_response, len(p.tokens)) for p in prompts]
    tensors[f"{name}/prompt/facts"] = torch.tensor(facts, dtype=torch.int64).view(-1, 5).T
    tensors[f"{name}/prompt/tokens"] = torch.tensor([t for p in prompts for t in p.tokens], dtype=torch.int64)


def _prompts(name: str, tensors: Mapping[str, Tensor]) -> list[Prompt]:
    facts = tensors[f"{name}/prompt/facts"]
    parts = tensors[f"{name}/prompt/tokens"].split(facts[4].tolist())
    return [
        Prompt(row=row, draw=draw, step=step, tokens=tuple(tokens.tolist()), max_response=None if most < 0 else most)
        for (row, draw, step, most, _), tokens in zip(facts.T.tolist(), parts, strict=True)
    ]


def _pack_drawn(name: str, drawn: Sequence[Partial | Beginning], tensors: dict[str, Tensor]) -> None:
    """First turns, none of a beginning, and lengths [2, R], and tokens, log-probabilities and versions end to end."""
    facts = [(one.first_turn if isinstance(one, Partial) else 0, len(one.tokens)) for one in drawn]
    tensors[f"{name}/drawn/facts"] = torch.tensor(facts, dtype=torch.int64).view(-1, 2).T
    tensors[f"{name}/drawn/tokens"] = torch.tensor([t for one in drawn for t in one.tokens], dtype=torch.int64)
    tensors[f"{name}/drawn/logprobs"] = torch.tensor([p for one in drawn for p in one.logprobs], dtype=torch.float64)
    tensors[f"{name}/drawn/versions"] = torch.tensor([v for one in drawn for v in one.versions], dtype=torch.int64)


def _partials(name: str, tensors: Mapping[str, Tensor]) -> list[Partial]:
    both = zip(_prompts(name, tensors), _drawn(name, tensors), strict=True)
    return [Partial(prompt=prompt, first_turn=first, **drawn) for prompt, (first, drawn) in both]


def _drawn(name: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The first turn of each, and what was drawn."""
    firsts, lengths = tensors[f"{name}/drawn/facts"].tolist()
    names = "tokens", "logprobs", "versions"
    parts = (tensors[f"{name}/drawn/{each}"].split(lengths) for each in names)
    for first, *values in zip(firsts, *parts, strict=True):
        yield first, {each: tuple(value.tolist()) for each, value in zip(names, values, strict=True)}


def _path(directory: Path, rank: int) -> Path:
    return directory / f"underway-{rank:05d}.safetensors"
