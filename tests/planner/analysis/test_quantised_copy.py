"""A generator in 8-bit floats is told with its bytes and its way to multiply; one that is not is not told."""

from __future__ import annotations

from meshwright.planner.analysis.optional_features import quantised_copy
from tests.planner.drawn import model_of
from tests.planner.jobs import quantised_facts, small_facts
from tests.planner.plans import random_plan


def test_nothing_is_told_of_a_generator_in_the_precision_of_its_job() -> None:
    assert quantised_copy(random_plan(3)) is None


def test_a_gpu_multiplies_8_bit_floats_and_a_cpu_casts_them_up() -> None:
    on_cpu = small_facts(memory_bytes=2**50).model_copy(update={"generation_weights": "fp8"})
    for facts, says in (
        (on_cpu, "casts 8-bit floats up to bf16"),
        (quantised_facts(on_cpu), "are multiplied as 8-bit floats"),
    ):
        found = quantised_copy(random_plan(3, facts, model_of(facts)))
        assert found is not None
        first, second, third = found.sentences
        assert first.startswith("actor_generate has its linear layers in 8-bit floats: its copy is 0.00 GiB a rank, ")
        assert 0.5 < found.copy_bytes / found.whole_bytes < 0.7
        assert says in second
        assert "weighted" in third
