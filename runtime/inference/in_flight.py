"""The state in flight on a rank between two periods: experience of later steps, and sequences being generated.

It belongs to one plan and one set of sampling parameters. With the same ones, a resumed run continues as if it had not
been stopped, with the same keys and values in the same slots. Under another plan only the tokens are resumed: see
`runtime.rollout.plan_change`. For the rules by which a period ends see `planner.simulation.flight`.
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
from safetensors.torch import save
from torch import Tensor

from meshwright.profiles.documents import SCHEMA_VERSION, require_version, write_bytes_atomically
from meshwright.profiles.errors import BadInput
from meshwright.profiles.untrusted_text import json_value, require_file
from meshwright.runtime.inference.slots import Finish, PartialResponse, Prompt, Response, ResumedSample
from meshwright.runtime.messages.sampling_masks import KEPT_BYTES, split_sets

_METADATA_KEY = "in_flight"
"""Key of the metadata of the files."""
_MAX_BYTES = 2**42
_CACHED = "cached/"
"""Prefix of the names of keys and values."""


@dataclass(frozen=True, kw_only=True)
class SequencesInFlight:
    """The sequences in flight of a replica, and this rank's keys and values of the live ones."""

    period: int
    live: tuple[tuple[PartialResponse, ...], ...]
    """The live sequences of each group of slots, in the order in which they were scheduled."""
    paused: tuple[PartialResponse, ...]
    """Pre-empted sequences, the oldest first."""
    waiting: tuple[Prompt, ...]
    ended: tuple[Response, ...]
    blocks: tuple[tuple[int, ...], ...]
    """Cache blocks of each live sequence, group by group. Attention sums over them in this order, so a resumed run
    gives the same bits."""
    cached: tuple[tuple[Tensor, Tensor], ...]
    """Keys and values [layers, kv_heads, tokens, head_dim] of each live sequence, group by group."""
    states: tuple[tuple[Tensor, Tensor], ...] = ()
    """States [layers, key heads, value heads of each, key size, value size] and last inputs [layers, channels, kernel]
    of each live sequence, in models that have layers with a state."""
    turns: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """The turn of multi-turn rollouts that are past their first, by sample id: its number from 1, and the index of its
    first token after the prompt. Such a rollout is paused, with the tool's answer to its last turn."""


@dataclass(frozen=True, kw_only=True)
class GenerationState:
    """The state of a replica's generation between two periods."""

    num_admitted: int
    """Prompts that the replica has admitted since step 0."""
    mean_response_tokens: float
    partial_batches: tuple[tuple[int, int, int], ...] = ()
    """Partly delivered prompt batches: step, how many of the replica's responses were delivered, and their tokens."""
    in_flight: SequencesInFlight | None
    resumed: Mapping[int, ResumedSample] = field(default_factory=dict)
    """Samples made under another plan for prompts that wait or are not admitted yet, by sample id."""
    delivered: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    """Sample ids of delivered responses, by step and row, for the steps that are not trained yet."""
    unadmitted: tuple[int, ...] = ()
    """The sample ids of the replica's prompts before step `end_step` that are not admitted."""
    end_step: int = 0
    num_wave_prompts: int = 0
    """Prompts that waves of dynamic sampling or best-of-n have used since step 0."""
    wave_prompts_before: Mapping[int, int] = field(default_factory=dict)
    """The number of prompts that waves used before a step, for each step that is sampled and not yet trained on."""
    history: tuple[tuple[tuple[int, ...], int, tuple[int, ...]], ...] = ()
    """Prompt tokens, step and response tokens of each response that drafts come from (`ResponseHistory.entries`)."""


class SamplingDigests(NamedTuple):
    """Digests of the plan and of the sampling parameters. If both are the same, a resumed run continues with everything
    in flight; under another plan, with the sampled tokens only."""

    plan: str
    sampling: str


@dataclass(frozen=True, kw_only=True)
class InFlightState:
    """Everything in flight on one rank. `experience` is by step, field and row; `generation` is None on a rank that
    does not generate."""

    digests: SamplingDigests
    num_steps: int
    """Total number of steps of the run that wrote it; it has computed nothing for a later step."""
    experience: Mapping[int, Mapping[str, Mapping[int, Tensor]]]
    generation: GenerationState | None
    reassigned: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Sample ids of batches that differ from those of the seed's order, by step."""
    selection: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of the samples that batches were selected from, by step."""


def pack_in_flight_state(state: InFlightState) -> bytes:
    """Serialize what is in flight on one rank as safetensors; what is not a list of numbers is JSON in the metadata."""
    tensors: dict[str, Tensor] = {}
    for step, fields in state.experience.items():
        for field_name, rows in fields.items():
            name = f"experience/{step}/{field_name}"
            tensors[name] = torch.cat(tuple(rows.values()))
            tensors[f"{name}/rows"] = torch.tensor([[*rows], [*map(len, rows.values())]])
    metadata: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "digests": state.digests,
        "num_steps": state.num_steps,
        "reassigned": state.reassigned,
        "selection": state.selection,
        "generation": None,
    }
    if generation := state.generation:
        metadata["generation"] = {
            "num_admitted": generation.num_admitted,
            "mean_response_tokens": generation.mean_response_tokens,
            "partial_batches": generation.partial_batches,
            "in_flight": generation.in_flight and _pack_in_flight(generation.in_flight, tensors),
            "resumed": [
                (sample_id, resumed.finish and resumed.finish.value)
                for sample_id, resumed in generation.resumed.items()
            ],
            "delivered": generation.delivered,
            "unadmitted": generation.unadmitted,
            "end_step": generation.end_step,
            "num_wave_prompts": generation.num_wave_prompts,
            "wave_prompts_before": generation.wave_prompts_before,
        }
        _pack_history(generation.history, tensors)
        _pack_sampled("resumed", list(generation.resumed.values()), tensors)
    content: bytes = save(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, {_METADATA_KEY: json.dumps(metadata)}
    )
    return content


def write_in_flight_state(directory: Path, rank: int, content: bytes) -> None:
    """Write the serialized state of a rank into the directory of a checkpoint; every rank writes its own file."""
    write_bytes_atomically(_path(directory, rank), content)


def read_in_flight_state(directory: Path, rank: int, digests: SamplingDigests) -> InFlightState | None:
    """Read the state that the rank wrote; None if it wrote none, or under another plan or other sampling parameters.

    Raises BadInput for a file that is no such state.
    """
    path = _path(directory, rank)
    return _read(path, digests) if path.exists() else None


def read_all_in_flight_states(directory: Path) -> tuple[InFlightState, ...]:
    """Read the states that all ranks wrote, under whatever plan, without keys and values.

    Raises BadInput for a file that is no such state.
    """
    states = (_read(path, None) for path in sorted(directory.glob("in_flight-*.safetensors")))
    return tuple(state for state in states if state is not None)


def _read(path: Path, digests: SamplingDigests | None) -> InFlightState | None:
    """Read one file. With no digests to compare, read it whatever they are, without keys and values."""
    require_file(path, "sequences in flight", _MAX_BYTES)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json_value((file.metadata() or {})[_METADATA_KEY], f"{path}")
            require_version(metadata, f"{path}", "remove it, and the responses are sampled again")
            if digests not in (None, SamplingDigests(*metadata["digests"])):
                return None
            names = [name for name in file.keys() if digests or not name.startswith(_CACHED)]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in names}
        return _unpack_state(metadata, tensors)
    except (OSError, SafetensorError, LookupError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        raise BadInput(
            f"{path} holds no sequences in flight that can be read ({type(error).__name__}: {error}); remove it, and "
            "they are sampled again."
        ) from None


def _unpack_state(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> InFlightState:
    """Return the state that `pack_in_flight_state` put into this metadata and these tensors."""
    experience: dict[int, dict[str, dict[int, Tensor]]] = {}
    for name, values in tensors.items():
        section, step, field_name, *suffix = name.split("/")
        if section == "experience" and not suffix:
            rows, lengths = tensors[f"{name}/rows"].tolist()
            row_values = (part.clone() for part in values.split(lengths))
            experience.setdefault(int(step), {})[field_name] = dict(zip(rows, row_values, strict=True))
    state, generation = metadata["generation"], None
    if state is not None:
        generation = GenerationState(
            num_admitted=state["num_admitted"],
            mean_response_tokens=state["mean_response_tokens"],
            partial_batches=tuple((step, number, tokens) for step, number, tokens in state["partial_batches"]),
            in_flight=state["in_flight"] and _unpack_in_flight(state["in_flight"], tensors),
            resumed=dict(_unpack_resumed(state["resumed"], tensors)),
            delivered={
                int(s): {int(row): sample_id for row, sample_id in d.items()} for s, d in state["delivered"].items()
            },
            unadmitted=tuple(state["unadmitted"]),
            end_step=state["end_step"],
            num_wave_prompts=state["num_wave_prompts"],
            wave_prompts_before={int(s): count for s, count in state.get("wave_prompts_before", {}).items()},
            history=_unpack_history(tensors),
        )
    return InFlightState(
        digests=SamplingDigests(*metadata["digests"]),
        num_steps=metadata["num_steps"],
        experience=experience,
        generation=generation,
        reassigned={int(step): tuple(sample_ids) for step, sample_ids in metadata["reassigned"].items()},
        selection={int(step): metrics for step, metrics in metadata.get("selection", {}).items()},
    )


def _unpack_resumed(
    headers: Sequence[tuple[int, str | None]], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[int, ResumedSample]]:
    for (sample_id, finish), (_, sampled) in zip(headers, _unpack_sampled("resumed", tensors), strict=True):
        yield sample_id, ResumedSample(**sampled, finish=Finish(finish) if finish else None)


def _pack_history(history: Sequence[tuple[tuple[int, ...], int, tuple[int, ...]]], tensors: dict[str, Tensor]) -> None:
    """Put steps and lengths of the responses in the history, [3, R], and their concatenated tokens into `tensors`; a
    response with the prompt of the one before it has a prompt of length 0 here."""
    facts, tokens = list[tuple[int, int, int]](), list[int]()
    before: tuple[int, ...] | None = None
    for prompt, step, response in history:
        new = () if prompt == before else prompt
        facts.append((step, len(new), len(response)))
        tokens += (*new, *response)
        before = prompt
    if facts:
        tensors["history/responses/facts"] = torch.tensor(facts, dtype=torch.int64).T
        tensors["history/responses/tokens"] = torch.tensor(tokens, dtype=torch.int32)


def _unpack_history(tensors: Mapping[str, Tensor]) -> tuple[tuple[tuple[int, ...], int, tuple[int, ...]], ...]:
    if "history/responses/facts" not in tensors:
        return ()
    facts, tokens = tensors["history/responses/facts"].T.tolist(), tensors["history/responses/tokens"].tolist()
    history, prompt, first = list[tuple[tuple[int, ...], int, tuple[int, ...]]](), (), 0
    for step, num_prompt, num_response in facts:
        prompt = tuple(tokens[first : first + num_prompt]) or prompt
        first += num_prompt
        history.append((prompt, step, tuple(tokens[first : first + num_response])))
        first += num_response
    return tuple(history)


def _pack_in_flight(state: SequencesInFlight, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Put the lists of numbers of the sequences in flight into `tensors`; return the rest, for the metadata."""
    live = [sequence for group in state.live for sequence in group]
    for number, (keys, values) in enumerate(state.cached):
        tensors[f"{_CACHED}{number}/keys"], tensors[f"{_CACHED}{number}/values"] = keys, values
    for number, (states, inputs) in enumerate(state.states):
        tensors[f"{_CACHED}{number}/states"], tensors[f"{_CACHED}{number}/inputs"] = states, inputs
    _pack_prompts("live", [sequence.prompt for sequence in live], tensors)
    _pack_sampled("live", live, tensors)
    _pack_prompts("paused", [sequence.prompt for sequence in state.paused], tensors)
    _pack_sampled("paused", state.paused, tensors)
    _pack_prompts("waiting", state.waiting, tensors)
    _pack_prompts("ended", [sequence.prompt for sequence in state.ended], tensors)
    _pack_sampled("ended", state.ended, tensors)
    return {
        "period": state.period,
        "groups": [len(group) for group in state.live],
        "blocks": state.blocks,
        "finishes": [response.finish.value for response in state.ended],
        "turns": [(sample_id, *turn) for sample_id, turn in state.turns.items()],
    }


def _unpack_in_flight(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SequencesInFlight:
    sequences = iter(_unpack_partials("live", tensors))
    responses = (
        Response(**vars(partial), finish=Finish(finish))
        for partial, finish in zip(_unpack_partials("ended", tensors), header["finishes"], strict=True)
    )
    numbers = range(len(header["blocks"]) if f"{_CACHED}0/keys" in tensors else 0)
    return SequencesInFlight(
        period=header["period"],
        live=tuple(tuple(itertools.islice(sequences, size)) for size in header["groups"]),
        paused=tuple(_unpack_partials("paused", tensors)),
        waiting=tuple(_unpack_prompts("waiting", tensors)),
        ended=tuple(responses),
        blocks=tuple(map(tuple, header["blocks"])),
        cached=tuple((tensors[f"{_CACHED}{number}/keys"], tensors[f"{_CACHED}{number}/values"]) for number in numbers),
        states=tuple(
            (tensors[f"{_CACHED}{number}/states"], tensors[f"{_CACHED}{number}/inputs"])
            for number in numbers
            if f"{_CACHED}{number}/states" in tensors
        ),
        turns={sample_id: (number, first) for sample_id, number, first in header.get("turns", ())},
    )


def _pack_prompts(name: str, prompts: Sequence[Prompt], tensors: dict[str, Tensor]) -> None:
    """Put the integers of the prompts, [5, P], and their concatenated tokens into `tensors`; -1 means no limit."""
    numbers = [
        (p.row, p.sample_id, p.step, -1 if p.max_response is None else p.max_response, len(p.tokens)) for p in prompts
    ]
    tensors[f"{name}/prompt/facts"] = torch.tensor(numbers, dtype=torch.int64).view(-1, 5).T
    tensors[f"{name}/prompt/tokens"] = torch.tensor([t for p in prompts for t in p.tokens], dtype=torch.int64)


def _unpack_prompts(name: str, tensors: Mapping[str, Tensor]) -> list[Prompt]:
    numbers = tensors[f"{name}/prompt/facts"]
    parts = tensors[f"{name}/prompt/tokens"].split(numbers[4].tolist())
    return [
        Prompt(
            row=row,
            sample_id=sample_id,
            step=step,
            tokens=tuple(tokens.tolist()),
            max_response=None if max_response < 0 else max_response,
        )
        for (row, sample_id, step, max_response, _), tokens in zip(numbers.T.tolist(), parts, strict=True)
    ]


def _pack_sampled(name: str, sequences: Sequence[PartialResponse | ResumedSample], tensors: dict[str, Tensor]) -> None:
    """Put first periods and lengths, [2, R], and concatenated tokens, log-probabilities, versions and, if there are
    any, the sizes and tokens of sampling masks into `tensors`.

    The first period is 0 for a sample that was resumed under another plan.
    """
    numbers = [
        (sequence.first_period if isinstance(sequence, PartialResponse) else 0, len(sequence.tokens))
        for sequence in sequences
    ]
    tensors[f"{name}/sampled/facts"] = torch.tensor(numbers, dtype=torch.int64).view(-1, 2).T
    tensors[f"{name}/sampled/tokens"] = torch.tensor(
        [t for sequence in sequences for t in sequence.tokens], dtype=torch.int64
    )
    tensors[f"{name}/sampled/logprobs"] = torch.tensor(
        [p for sequence in sequences for p in sequence.logprobs], dtype=torch.float64
    )
    tensors[f"{name}/sampled/versions"] = torch.tensor(
        [v for sequence in sequences for v in sequence.versions], dtype=torch.int64
    )
    kept = [one for sequence in sequences for one in sequence.kept]
    if kept:
        tensors[f"{name}/sampled/kept"] = torch.frombuffer(bytearray(b"".join(kept)), dtype=torch.int32)
        tensors[f"{name}/sampled/kept_counts"] = torch.tensor([len(one) // KEPT_BYTES for one in kept])


def _unpack_partials(name: str, tensors: Mapping[str, Tensor]) -> list[PartialResponse]:
    pairs = zip(_unpack_prompts(name, tensors), _unpack_sampled(name, tensors), strict=True)
    return [PartialResponse(prompt=prompt, first_period=first, **sampled) for prompt, (first, sampled) in pairs]


def _unpack_sampled(name: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the first period of each sequence, and its tokens, log-probabilities, versions and sampling masks."""
    firsts, lengths = tensors[f"{name}/sampled/facts"].tolist()
    names = "tokens", "logprobs", "versions"
    parts = (tensors[f"{name}/sampled/{each}"].split(lengths) for each in names)
    counts = tensors.get(f"{name}/sampled/kept_counts")
    kept = [] if counts is None else split_sets(tensors[f"{name}/sampled/kept"], counts)
    end = 0
    for first, *values in zip(firsts, *parts, strict=True):
        begin, end = end, end + len(values[0])
        sampled = {each: tuple(value.tolist()) for each, value in zip(names, values, strict=True)}
        yield first, {**sampled, "kept": tuple(kept[begin:end])}


def _path(directory: Path, rank: int) -> Path:
    return directory / f"in_flight-{rank:05d}.safetensors"
