"""What generates, by name."""

from typing import get_args

import pytest

from meshwright.profiles.engines import OWN, EngineName, engine_named, own_engine, require_possible_engine
from meshwright.profiles.errors import BadInput


@pytest.mark.parametrize("name", get_args(EngineName))
def test_an_engine_is_known_with_its_source_and_passes_of_a_framework(name: EngineName) -> None:
    engine = engine_named(name)
    assert len(engine.source) > 40
    assert len(engine.passes.source) > 40


def test_ours_take_weights_where_they_are_read_and_the_others_through_a_loader() -> None:
    assert {name for name in get_args(EngineName) if engine_named(name).refit.in_place} == set(OWN)


def test_ours_differ_in_who_launches_the_layers_of_a_decode_step_alone() -> None:
    eager, graph = (engine_named(name).passes for name in OWN)
    differing = {name for name in type(eager).model_fields if getattr(eager, name) != getattr(graph, name)}
    assert differing == {"recorded_decode", "source"}


def test_run_records_decode_steps_on_a_gpu_and_not_with_experts() -> None:
    found = [own_engine(kind, has_experts=experts) for kind in ("cuda", "cpu") for experts in (False, True)]
    assert found == ["meshwright-graph", "meshwright-eager", "meshwright-eager", "meshwright-eager"]


def test_steps_that_cannot_be_recorded_are_refused_with_the_reason() -> None:
    require_possible_engine("meshwright-graph", "cuda", has_experts=False)
    with pytest.raises(BadInput, match=r"^engine=meshwright-graph .* a CPU has no graphs; use meshwright-eager\.$"):
        require_possible_engine("meshwright-graph", "cpu", has_experts=False)
    with pytest.raises(BadInput, match="the host routes tokens to experts; use meshwright-eager"):
        require_possible_engine("meshwright-graph", "cuda", has_experts=True)


def test_an_unknown_engine_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(BadInput, match=r"^engine 'vlm' is not known; did you mean 'vllm'\?$"):
        engine_named("vlm")
