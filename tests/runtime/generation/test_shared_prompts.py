"""Of the samples of a prompt one is prefilled, and each draws what it would with a prefill of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import read_model
from meshwright.runtime.generation.engine import Generator
from meshwright.runtime.generation.shared_prompts import Copied, SharedPrompts
from meshwright.runtime.generation.slots import LiveSequence, Prompt, Response
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.model.model_shard import build_model
from meshwright.runtime.model.weights import load_weights
from tests.runtime.checkpoints import tokens, write_checkpoint
from tests.runtime.ranks import run_on_ranks

GROUP, NUM_PROMPTS, VOCAB_SIZE, EOS = 4, 5, 24, 7
PROMPTS = tuple(
    Prompt(row=row, draw=row, tokens=tuple((tokens(1, 6, seed=row // GROUP)[0] % VOCAB_SIZE).tolist()))
    for row in range(GROUP * NUM_PROMPTS)
)


def sequence(row: int, step: int = 0) -> LiveSequence:
    return LiveSequence(prompt=Prompt(row=row, draw=row, tokens=(1, 2, 3), step=step))


def logits(count: int) -> torch.Tensor:
    return torch.arange(count)[:, None] * torch.ones(2)


def test_the_first_of_each_group_is_prefilled_and_the_others_copy_it() -> None:
    admitted = [sequence(row) for row in range(6)]
    shared = SharedPrompts(GROUP)
    found = shared.parted(admitted, 3, enumerate(admitted, start=3))
    assert found.fresh == (0, 4)
    assert found.copies == (Copied(3, 4, 3), Copied(3, 5, 3), Copied(3, 6, 3), Copied(7, 8, 3))
    said = shared.of_all(admitted, found.fresh, logits(2))
    assert said is not None
    assert said[:, 0].tolist() == [0, 0, 0, 0, 1, 1]


def test_a_later_sample_copies_one_that_is_still_live() -> None:
    first, second = [sequence(0), sequence(1)], [sequence(2)]
    shared = SharedPrompts(GROUP)
    shared.of_all(first, shared.parted(first, 0, enumerate(first)).fresh, logits(1))
    shared.keep_for([sequence(2).prompt])
    found = shared.parted(second, 2, enumerate([*first, *second]))
    assert found == ((), (Copied(1, 2, 3),))
    assert shared.of_all(second, found.fresh, None) is not None


@pytest.mark.parametrize(
    "why", ["none is live", "the weights may have changed", "another group waited", "another step"]
)
def test_a_later_sample_is_prefilled_where_there_is_nothing_to_copy(why: str) -> None:
    first, second = [sequence(0)], [sequence(1, step=1 if why == "another step" else 0)]
    shared = SharedPrompts(GROUP)
    shared.of_all(first, shared.parted(first, 0, enumerate(first)).fresh, logits(1))
    if why == "the weights may have changed":
        shared.forget()
    if why == "another group waited":
        shared.keep_for([sequence(GROUP).prompt])
    live = second if why == "none is live" else [*first, *second]
    assert shared.parted(second, len(live) - 1, enumerate(live)).fresh == (0,)


def test_a_group_of_one_shares_nothing() -> None:
    admitted = [sequence(0), sequence(1)]
    shared, said = SharedPrompts(1), logits(2)
    assert shared.parted(admitted, 0, enumerate(admitted)) == ((0, 1), ())
    assert shared.of_all(admitted, (0, 1), said) is said


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
        max_tokens=40,
        max_response=24,
        eos_tokens=frozenset({EOS}),
        temperature=0.8,
        seed=5,
        group_size=group_size,
    )
    prefilled: list[int] = []
    cache_prompts = generator._cache_prompts

    def counted(first_slot: int, fresh: list[tuple[int, LiveSequence]]) -> torch.Tensor | None:
        prefilled.append(len(fresh))
        return cache_prompts(first_slot, fresh)

    generator._cache_prompts = counted  # type: ignore[method-assign,assignment]
    return generator.generate(PROMPTS), sum(prefilled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "num_slots"), [("tp1", 20), ("tp1", 8), ("tp1", 3), ("tp2", 6), ("pp2", 7), ("pp4", 20), ("tp2,pp2", 5)]
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
