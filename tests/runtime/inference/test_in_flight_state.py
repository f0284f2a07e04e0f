"""What is under way on a rank is read as it was written, by those who would have drawn it alike."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshwright.profiles.errors import BadInput
from meshwright.runtime.inference.in_flight import (
    GenerationState,
    InFlightState,
    SamplingDigests,
    SequencesInFlight,
    pack_in_flight_state,
    read_in_flight_state,
    write_in_flight_state,
)
from meshwright.runtime.inference.slots import Finish, PartialResponse, Prompt, Response

ONE = SamplingDigests("one plan", "one temperature")


def state_in_flight(draws_by: SamplingDigests = ONE) -> InFlightState:
    prompt = Prompt(row=0, sample_id=5, tokens=(1, 2))
    response = Response(prompt=prompt, tokens=(7,), logprobs=(-0.5,), versions=(2,), finish=Finish.EOS, first_period=1)
    in_flight = SequencesInFlight(
        period=3,
        live=((PartialResponse(prompt=prompt, tokens=(4,), logprobs=(-1.0,), versions=(2,)),), ()),
        paused=(PartialResponse(prompt=prompt, tokens=(4, 5), logprobs=(-1.0, -2.0), versions=(1, 2), first_period=2),),
        waiting=(Prompt(row=1, sample_id=6, tokens=(3,)),),
        ended=(response,),
        blocks=((3, 1),),
        cached=((torch.arange(8.0).view(1, 2, 2, 2), torch.ones(1, 2, 2, 2)),),
    )
    drawing = GenerationState(
        num_admitted=9,
        mean_response_tokens=4.5,
        partial_batches=((1, 2, 3),),
        in_flight=in_flight,
        history=(((1, 2), 4, (7, 8)), ((1, 2), 4, (9,)), ((3,), 5, (1, 1, 1))),
    )
    message = torch.arange(1000)  # of which rows are views
    experience = {4: {"tokens": {2: message[:3], 5: message[3:5]}}}
    return InFlightState(digests=draws_by, num_steps=6, experience=experience, generation=drawing)


def test_a_rank_reads_what_it_wrote(tmp_path: Path) -> None:
    written = state_in_flight()
    write_in_flight_state(tmp_path, 3, pack_in_flight_state(written))
    found = read_in_flight_state(tmp_path, 3, ONE)
    assert found is not None
    assert found.num_steps == written.num_steps
    assert found.generation is not None
    assert written.generation is not None
    assert found.generation.partial_batches == written.generation.partial_batches
    assert found.generation.history == written.generation.history
    one, other = found.generation.in_flight, written.generation.in_flight
    assert one is not None
    assert other is not None
    for field in ("period", "live", "paused", "waiting", "ended", "blocks"):
        assert getattr(one, field) == getattr(other, field)
    assert all(torch.equal(a, b) for a, b in zip(one.cached[0], other.cached[0], strict=True))
    assert {row: values.tolist() for row, values in found.experience[4]["tokens"].items()} == {2: [0, 1, 2], 5: [3, 4]}


def test_keys_and_values_may_be_in_bf16(tmp_path: Path) -> None:
    state = state_in_flight()
    assert state.generation is not None
    assert state.generation.in_flight is not None
    kept = ((torch.arange(8.0, dtype=torch.bfloat16).view(1, 2, 2, 2), torch.ones(1, 2, 2, 2, dtype=torch.bfloat16)),)
    generation = replace(state.generation, in_flight=replace(state.generation.in_flight, cached=kept))
    write_in_flight_state(tmp_path, 0, pack_in_flight_state(replace(state, generation=generation)))
    read = read_in_flight_state(tmp_path, 0, ONE)
    assert read is not None
    assert read.generation is not None
    assert read.generation.in_flight is not None
    assert all(torch.equal(a, b) for a, b in zip(read.generation.in_flight.cached[0], kept[0], strict=True))


def test_nothing_in_flight_is_read_as_nothing(tmp_path: Path) -> None:
    nothing = SequencesInFlight(period=1, live=((), ()), paused=(), waiting=(), ended=(), blocks=(), cached=())
    drawing = GenerationState(num_admitted=3, mean_response_tokens=0.1, in_flight=nothing, num_wave_prompts=5)
    for number, kept in enumerate((drawing, None)):
        written = InFlightState(digests=ONE, num_steps=6, experience={}, generation=kept)
        write_in_flight_state(tmp_path, number, pack_in_flight_state(written))
        assert read_in_flight_state(tmp_path, number, ONE) == written


@pytest.mark.parametrize("content", [b"", b"x" * 200, pickle.dumps(state_in_flight())], ids=["empty", "text", "pickle"])
def test_a_file_of_another_kind_is_refused_in_a_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in_flight-00000.safetensors").write_bytes(content)
    with pytest.raises(BadInput, match="holds no sequences in flight that can be read"):
        read_in_flight_state(tmp_path, 0, ONE)


def test_a_file_of_another_version_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "in_flight-00000.safetensors"
    save_file({"x": torch.ones(1)}, path, {"in_flight": json.dumps({"schema_version": 2, "draws_by": []})})
    with pytest.raises(BadInput, match=r"schema_version=2 is not the 3 this program reads; remove it, and the .*\.$"):
        read_in_flight_state(tmp_path, 0, ONE)


def test_what_was_cut_short_is_refused_in_a_sentence(tmp_path: Path) -> None:
    write_in_flight_state(tmp_path, 0, pack_in_flight_state(state_in_flight()))
    path = tmp_path / "in_flight-00000.safetensors"
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(BadInput, match="they are sampled again"):
            read_in_flight_state(tmp_path, 0, ONE)


def test_what_was_drawn_by_something_else_or_by_another_rank_is_left_behind(tmp_path: Path) -> None:
    write_in_flight_state(tmp_path, 3, pack_in_flight_state(state_in_flight()))
    assert read_in_flight_state(tmp_path, 3, ONE._replace(plan="another plan")) is None
    assert read_in_flight_state(tmp_path, 2, ONE) is None


def test_rows_of_one_message_are_not_saved_with_all_of_it(tmp_path: Path) -> None:
    write_in_flight_state(tmp_path, 0, pack_in_flight_state(state_in_flight()))
    [found] = tmp_path.iterdir()
    kept = read_in_flight_state(tmp_path, 0, ONE)
    assert kept is not None
    assert all(values.untyped_storage().nbytes() == values.nbytes for values in kept.experience[4]["tokens"].values())
    assert found.stat().st_size < 8000


def test_sampling_masks_in_flight_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Of a live sequence, of a paused one with a tool token, and of an ended one."""
    written = state_in_flight()
    assert written.generation is not None
    flight = written.generation.in_flight
    assert flight is not None
    first, second = (torch.tensor(numbers, dtype=torch.int32).numpy().tobytes() for numbers in ([4, 9], [1, 4, 5]))
    kept = replace(
        flight,
        live=((replace(flight.live[0][0], kept=(first,)),), ()),
        paused=(replace(flight.paused[0], kept=(second, b"")),),
        ended=(replace(flight.ended[0], kept=(second,)),),
    )
    state = replace(written, generation=replace(written.generation, in_flight=kept))
    write_in_flight_state(tmp_path, 0, pack_in_flight_state(state))
    found = read_in_flight_state(tmp_path, 0, ONE)
    assert found is not None
    assert found.generation is not None
    assert found.generation.in_flight is not None
    for field in ("live", "paused", "ended"):
        assert getattr(found.generation.in_flight, field) == getattr(kept, field)
