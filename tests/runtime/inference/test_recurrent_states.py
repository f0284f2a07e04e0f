"""States of gated delta layers are those of the tokens that their rows have passed, whatever rows are admitted beside
them, share their prompt, are pre-empted or resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import model_from_config
from meshwright.runtime.inference.in_flight import pack_in_flight_state, read_in_flight_state, write_in_flight_state
from meshwright.runtime.model.kv_cache import allocate_cache
from tests.profiles.model_parts.published import PUBLISHED
from tests.runtime.checkpoints import DELTA, write_checkpoint
from tests.runtime.inference import test_engine, test_shared_prompts, test_tool_turns
from tests.runtime.inference.test_in_flight_state import ONE, state_in_flight
from tests.runtime.inference.test_tool_turns import Case
from tests.runtime.laws import test_preemption
from tests.runtime.ranks import run_on_ranks
from tests.seeds import cases

VOCAB_SIZE = 24


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "actor", "Qwen3_5", **DELTA, vocab_size=VOCAB_SIZE)


@pytest.mark.slow
@cases(("layout", "num_slots"), [("tp1", 3), ("pp2", 7), ("tp2", 20), ("tp2,pp2", 5)], few=1)
def test_a_sample_starts_from_the_state_after_its_prompt_though_the_prefilled_one_has_moved_on(
    directory: Path, layout: str, num_slots: int
) -> None:
    """With three slots, the last of four samples is admitted when one of the others has ended."""
    test = test_shared_prompts
    alone, shared = (
        [answer for answer in run_on_ranks(4, test.generate, directory, layout, num_slots, size) if answer]
        for size in (1, test.GROUP)
    )
    assert len(alone) == Layout.parse(layout).num_ranks
    for (one, every), (other, first) in zip(alone, shared, strict=True):
        assert [response.tokens for response in one] == [response.tokens for response in other]
        assert every == len(test.PROMPTS)
        assert first < every / 2


@pytest.mark.check_all
def test_what_is_generated_is_what_is_trained_in_any_layout(directory: Path) -> None:
    alone = run_on_ranks(4, test_engine.generate, directory, "tp1", 1)[0]
    assert alone is not None
    assert max(alone[1]) < 1e-4
    assert max(len(response.tokens) for response in alone[0]) > 12
    for layout, num_slots in (("tp1", 4), ("tp2", 4), ("pp2", 3)):
        for answer in run_on_ranks(4, test_engine.generate, directory, layout, num_slots):
            assert answer is None or [r.tokens for r in answer[0]] == [r.tokens for r in alone[0]]


@pytest.mark.check_all
@pytest.mark.parametrize("layout", ["tp1", "pp2"])
def test_recomputed_states_are_those_of_the_new_weights_and_kept_ones_are_not(directory: Path, layout: str) -> None:
    test_engine.test_a_recomputed_cache_is_that_of_the_new_weights_and_a_kept_one_is_not(directory, layout)


@pytest.mark.check_all
@pytest.mark.parametrize(("layout", "group_size"), [("tp1", test_preemption.GROUP), ("pp2", 1)])
def test_a_row_that_was_preempted_passes_its_tokens_again(directory: Path, layout: str, group_size: int) -> None:
    test = test_preemption
    test.test_with_blocks_for_a_third_of_the_rows_the_same_tokens_are_drawn(directory, layout, 2, group_size, 1.0)


@pytest.mark.slow
def test_what_is_taken_over_goes_on_bit_for_bit(directory: Path) -> None:
    test_preemption.test_what_is_taken_over_goes_on_bit_for_bit_paused_or_not(directory)


@pytest.mark.check_all
@pytest.mark.parametrize("keeps_cache", [True, False])
def test_a_rollout_goes_on_from_its_state_behind_what_its_tool_answered(tmp_path: Path, keeps_cache: bool) -> None:
    test = test_tool_turns
    directory = write_checkpoint(tmp_path / "actor", "Qwen3_5", **DELTA, vocab_size=len(test.LETTERS))
    alone = run_on_ranks(4, test.generate, directory, Case("tp1", 1), True)[0]
    assert alone is not None
    assert sum(map(test.num_calls, alone)) > 3
    for case in (Case("tp1", 11, group_size=4), Case("pp2", 5)):
        for responses in filter(None, run_on_ranks(4, test.generate, directory, case, keeps_cache)):
            assert [one.tokens for one in responses] == [one.tokens for one in alone]


def test_states_are_read_as_they_were_written(tmp_path: Path) -> None:
    kept = ((torch.arange(16.0).view(1, 2, 2, 2, 2), torch.ones(1, 3, 4, dtype=torch.bfloat16)),)
    state = state_in_flight()
    assert state.generation is not None
    assert state.generation.in_flight is not None
    generation = replace(state.generation, in_flight=replace(state.generation.in_flight, states=kept))
    write_in_flight_state(tmp_path, 0, pack_in_flight_state(replace(state, generation=generation)))
    read = read_in_flight_state(tmp_path, 0, ONE)
    assert read is not None
    assert read.generation is not None
    assert read.generation.in_flight is not None
    [(states, inputs)] = read.generation.in_flight.states
    assert torch.equal(states, kept[0][0])
    assert torch.equal(inputs, kept[0][1])


def test_a_cache_holds_the_bytes_that_are_planned() -> None:
    """Three of four layers have a state; the plan counts rows and two spare states."""
    config = PUBLISHED["qwen3.5-9b-text"] | {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 64}
    spec = model_from_config(json.loads(json.dumps(config)), name="small")
    assert spec.linear is not None
    for tp, layers in ((1, range(8)), (2, range(4, 8)), (4, range(3))):
        cache = allocate_cache(
            spec,
            layers,
            tp,
            num_blocks=2,
            num_rows=5,
            max_tokens=16,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        assert cache.states is not None
        num_states = spec.linear_layers_between(layers.start, layers.stop) * (5 + 2)
        num_bytes = cache.states.states.nbytes + cache.states.inputs.nbytes
        assert num_bytes == num_states * spec.linear.shard(tp).state_bytes(2)
        assert len(cache.keys) == spec.attention_layers_between(layers.start, layers.stop)
