"""Of the samples of a prompt one is prefilled, and each draws what it would with a prefill of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.scheduler import PrefillPart, ScheduledBatch, SharedPrompts
from meshwright.runtime.inference.slots import LiveGroup, LiveSequence, Numbers, PartialResponse, Prompt, Response
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights
from tests.runtime.checkpoints import tokens, write_checkpoint
from tests.runtime.ranks import run_on_ranks
from tests.seeds import cases

GROUP, NUM_PROMPTS, VOCAB_SIZE, EOS = 4, 5, 24, 7
PROMPTS = tuple(
    Prompt(row=row, sample_id=row, tokens=tuple((tokens(1, 38, seed=row // GROUP)[0] % VOCAB_SIZE).tolist()))
    for row in range(GROUP * NUM_PROMPTS)
)


def sequences(count: int) -> list[LiveSequence]:
    """Of one group of slots, of prompts in groups of samples, one behind the other."""
    group = LiveGroup(first_slot=3, num_slots=count)
    return [group.add(PartialResponse(prompt=Prompt(row=row, sample_id=row, tokens=(1, 2, 3)))) for row in range(count)]


def admit(
    shared: SharedPrompts, admitted: Sequence[LiveSequence], of_each: float = 1.0
) -> tuple[list[int | None], Any]:
    """The slots that the sequences read from, and what is said of all where each that is fed is told its number."""
    sources = []
    for one in admitted:
        sources.append(shared.source(one.prompt))
        shared.add(one.prompt, one.slot)
    fed = [index for index, source in enumerate(sources) if source is None]
    logits = torch.arange(len(fed))[:, None] * torch.full((2,), of_each)
    said = shared.all_logits(admitted, fed, logits if fed else None)
    return sources, None if said is None else said[:, 0].tolist()


def test_the_first_of_each_group_is_fed_and_the_others_read_it() -> None:
    sources, said = admit(SharedPrompts(GROUP), sequences(6))
    assert sources == [None, 3, 3, 3, None, 7]
    assert said == [0, 0, 0, 0, 1, 1]


def test_a_later_sample_reads_one_that_is_still_live() -> None:
    shared, (first, second, third, *_) = SharedPrompts(GROUP), sequences(6)
    admit(shared, [first, second])
    shared.keep_for([third.prompt])
    shared.remove([first.slot])
    assert admit(shared, [third]) == ([second.slot], [0])


@pytest.mark.parametrize("why", ["none is live", "the weights may have changed", "another group waited"])
def test_a_later_sample_is_fed_where_there_is_nothing_to_read(why: str) -> None:
    shared, (first, second, *_, other) = SharedPrompts(GROUP), sequences(GROUP + 1)
    admit(shared, [first])
    if why == "none is live":
        shared.remove([first.slot])
    if why == "the weights may have changed":
        shared.forget()
    if why == "another group waited":
        shared.keep_for([other.prompt])
    assert shared.source(second.prompt) is None


def test_samples_of_another_step_share_nothing() -> None:
    shared, [one] = SharedPrompts(GROUP), sequences(1)
    admit(shared, [one])
    assert shared.source(replace(one.prompt, step=1)) is None


def test_a_sample_that_goes_on_says_nothing_of_its_prompt() -> None:
    shared, (first, second, *_) = SharedPrompts(GROUP), sequences(3)
    admit(shared, [first])
    shared.all_logits([second], [0], torch.ones(1, 2))  # fed with what it had drawn, and never seated as a sample
    assert admit(shared, [second]) == ([first.slot], [0])


def test_a_group_of_one_shares_nothing() -> None:
    assert admit(SharedPrompts(1), sequences(2)) == ([None, None], [0, 1])


def generate(directory: Path, layout: str, num_slots: int, group_size: int) -> tuple[tuple[Response, ...], int] | None:
    """The responses of all rows on one replica, and how many prompts it has prefilled."""
    mesh = build_mesh(Layout.parse(layout), 0)
    if not mesh.is_member:
        return None
    spec = read_model(directory)
    model = build_model(spec, mesh)
    load_weights(model, spec, mesh, directory)
    generator = Generator(
        model,
        spec,
        mesh,
        num_slots=num_slots,
        max_tokens=62,
        max_response=24,
        eos_tokens=frozenset({EOS}),
        temperature=0.8,
        seed=5,
        group_size=group_size,
    )
    prefilled: list[int] = []
    draw_next = generator.sample_next

    def counted(
        group: LiveGroup, continuing: Numbers, admitted: ScheduledBatch, parts: Sequence[Sequence[PrefillPart]]
    ) -> object:
        prefilled.append(len(admitted.prefilled))
        return draw_next(group, continuing, admitted, parts)

    generator.sample_next = counted  # type: ignore[method-assign,assignment]
    return generator.generate(PROMPTS), sum(prefilled)


@pytest.mark.slow
@cases(
    ("layout", "num_slots"),
    [("tp1", 20), ("tp1", 8), ("tp1", 3), ("tp2", 6), ("pp2", 7), ("pp4", 20), ("tp2,pp2", 5)],
    few=2,
)
def test_sharing_changes_nothing_of_what_is_drawn(
    tmp_path_factory: pytest.TempPathFactory, layout: str, num_slots: int
) -> None:
    directory = write_checkpoint(tmp_path_factory.mktemp("models") / "actor", vocab_size=VOCAB_SIZE)
    alone, shared = (
        [answer for answer in run_on_ranks(4, generate, directory, layout, num_slots, size) if answer]
        for size in (1, GROUP)
    )
    for (one, every), (other, first) in zip(alone, shared, strict=True):
        assert [response.tokens for response in one] == [response.tokens for response in other]
        for response, same in zip(one, other, strict=True):
            assert response.logprobs == pytest.approx(same.logprobs, abs=1e-5)
        assert every == len(PROMPTS)
        assert NUM_PROMPTS <= first <= NUM_PROMPTS + 3  # of a group all of whose samples have ended, the next one
