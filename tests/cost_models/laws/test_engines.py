"""Laws of what generates: facts order engines, and touch nothing but generation."""

from collections.abc import Callable

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.protocol import StageQuery
from meshwright.profiles.frameworks import EngineName, engine_named
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.table import Table
from meshwright.profiles.workload import Workload

LAYOUTS = ("dp8", "tp2,dp4", "tp8", "pp2,dp4")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slots", [1, 8, 64])
def test_recorded_decode_steps_never_take_longer(
    layout: str, slots: int, a100s: Callable[[int], Cluster], long_tail: Workload, query: Callable[..., StageQuery]
) -> None:
    asked = query("actor_generate", layout, slots=slots)
    eager, graph = (
        cost_model(a100s(1), long_tail, "bf16", engine=name).seconds(asked)
        for name in ("meshwright-eager", "meshwright-graph")
    )
    assert graph.total <= eager.total
    assert {term.name: term for term in graph.terms if "decode layers" not in term.name} == {
        term.name: term for term in eager.terms if "decode layers" not in term.name
    }


@pytest.mark.parametrize("stage", ["reward_score", "ref_logprob", "actor_train"])
def test_an_engine_generates_and_does_nothing_else(
    stage: str, a100s: Callable[[int], Cluster], fixed: Workload, query: Callable[..., StageQuery]
) -> None:
    names: tuple[EngineName, ...] = ("meshwright-eager", "meshwright-graph", "vllm", "trtllm")
    found = {cost_model(a100s(1), fixed, "bf16", engine=name).seconds(query(stage, "tp2,dp4", 4)) for name in names}
    assert len(found) == 1


def test_without_an_engine_kernels_are_launched_one_by_one(
    a100s: Callable[[int], Cluster], long_tail: Workload, query: Callable[..., StageQuery]
) -> None:
    asked = query("actor_generate", "tp2,dp4", slots=32)
    eager = AnalyticModel(a100s(1), long_tail, "bf16", engine=engine_named("meshwright-eager"))
    assert AnalyticModel(a100s(1), long_tail, "bf16").seconds(asked) == eager.seconds(asked)


def test_a_busier_host_takes_longer(
    a100s: Callable[[int], Cluster], long_tail: Workload, query: Callable[..., StageQuery]
) -> None:
    """Of two engines that differ in the host's work for each round and row alone."""
    engine, asked = engine_named("vllm"), query("actor_generate", "tp2,dp4", slots=32)

    def seconds(round_seconds: float, row_seconds: float) -> float:
        busier = engine.framework_on("cuda").model_copy(
            update={"round_seconds": round_seconds, "row_seconds": row_seconds}
        )
        return AnalyticModel(a100s(1), long_tail, "bf16", framework=busier).seconds(asked).total

    found = [seconds(0.0, 0.0), seconds(1e-3, 0.0), seconds(1e-3, 1e-5)]
    assert found == sorted(set(found))


def test_prompts_of_more_tokens_than_a_pass_takes_are_prefilled_in_several(
    a100s: Callable[[int], Cluster], long_tail: Workload, query: Callable[..., StageQuery]
) -> None:
    passes, asked = engine_named("meshwright-graph").framework_on("cuda"), query("actor_generate", "dp8", slots=64)

    def prefill(max_tokens: int | None) -> float:
        framework = passes.model_copy(update={"max_tokens": max_tokens})
        cost = AnalyticModel(a100s(1), long_tail, "bf16", framework=framework).seconds(asked)
        return sum(term.amount for term in cost.terms if term.name.startswith("prefill"))

    assert prefill(None) == prefill(10**6) <= prefill(2048) < prefill(128)


def test_a_table_answers_for_the_engine_that_it_timed(
    table: Table, a100s: Callable[[int], Cluster], fixed: Workload, query: Callable[..., StageQuery]
) -> None:
    """The table has twice the analytic seconds: of a GPU those of recorded steps, which say nothing of another's."""
    asked = query("actor_generate", "tp1,dp8", slots=4)

    def decoding(name: EngineName | None, measured: Table | None) -> float:
        cost = cost_model(a100s(1), fixed, "bf16", measured, name).seconds(asked)
        return next(term.amount for term in cost.terms if term.name == "decode layers")

    assert table.provenance.engine == "meshwright-graph"
    assert decoding("meshwright-graph", table) == decoding(None, table) != decoding("meshwright-graph", None)
    for other in ("meshwright-eager", "vllm"):
        assert decoding(other, table) == decoding(other, None)
