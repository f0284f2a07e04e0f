from collections.abc import Callable

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.cost import Cost
from meshwright.cost_models.question import Move
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model import ModelSpec
from meshwright.profiles.workload import Workload


@pytest.fixture
def move(a100s: Callable[[int], Cluster], llama: ModelSpec, fixed: Workload) -> Callable[..., Cost]:
    def of(source: str, target: str, overlap: int, nodes: int = 1) -> Cost:
        question = Move(model=llama, source=Layout.parse(source), target=Layout.parse(target), overlap=overlap)
        return AnalyticModel(a100s(nodes), fixed, "bf16").move_seconds(question)

    return of


def test_weights_on_unchanged_ranks_are_copied_in_place(move: Callable[..., Cost]) -> None:
    assert [term.name for term in move("tp2,dp4", "tp2,dp4", 8).terms] == ["weight copy"]


def test_a_refit_receives_a_shard_per_rank(move: Callable[..., Cost], llama: ModelSpec) -> None:
    cost = move("tp2,dp2", "tp4", 0)
    bytes_term = next(term.amount for term in cost.terms if term.name == "weight bytes")
    assert bytes_term == pytest.approx(2 * llama.num_params / 4 / (300e9 * 0.7), rel=0.01)


def test_few_senders_limit_many_receivers(move: Callable[..., Cost]) -> None:
    assert move("tp1", "dp4", 0).total > 2 * move("dp4", "dp4", 0).total


def test_between_nodes_it_takes_longer(move: Callable[..., Cost]) -> None:
    assert move("tp8", "tp8", 0, nodes=2).total > 4 * move("tp4", "tp4", 0).total


def test_experience_pays_latency_and_bandwidth(a100s: Callable[[int], Cluster], fixed: Workload) -> None:
    near, far = AnalyticModel(a100s(1), fixed, "bf16"), AnalyticModel(a100s(2), fixed, "bf16")
    assert 0 < near.handover_seconds(0).total < near.handover_seconds(1e9).total < far.handover_seconds(1e9).total
