from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.communication import refit_seconds
from meshwright.cost_models.cost import Cost
from meshwright.cost_models.protocol import RefitQuery, StageQuery
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.experts import Experts
from meshwright.profiles.frameworks import engine_named, own_framework
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.fp8_weights import linears_of
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Offload
from meshwright.profiles.workload import Workload


@pytest.fixture
def move(a100s: Callable[[int], Cluster], llama: ModelSpec, fixed: Workload) -> Callable[..., Cost]:
    def of(source: str, target: str, overlap: int, nodes: int = 1) -> Cost:
        question = RefitQuery(model=llama, source=Layout.parse(source), target=Layout.parse(target), overlap=overlap)
        return AnalyticModel(a100s(nodes), fixed, "bf16").refit_seconds(question)

    return of


def test_weights_on_unchanged_ranks_are_copied_in_place(move: Callable[..., Cost]) -> None:
    assert [term.name for term in move("tp2,dp4", "tp2,dp4", 8).terms] == ["weight copy"]


def test_a_refit_receives_a_shard_per_rank(move: Callable[..., Cost], llama: ModelSpec) -> None:
    cost = move("tp2,dp2", "tp4", 0)
    bytes_term = next(term.amount for term in cost.terms if term.name == "weight bytes")
    assert bytes_term == pytest.approx(2 * llama.num_params / 4 / (300e9 * 0.7), rel=0.01)


def test_of_the_source_only_its_ranks_and_its_slices_matter(move: Callable[..., Cost]) -> None:
    """Two slices of each of six tensors in 32 layers, whether they are halves of tensors or of the layers."""
    assert move("tp4,dp2", "tp2,dp4", 8) == move("tp2,pp2,dp2", "tp2,dp4", 8)
    assert move("tp4,dp2", "tp2,dp4", 8) != move("tp8", "tp2,dp4", 8)


def test_few_senders_limit_many_receivers(move: Callable[..., Cost]) -> None:
    assert move("tp1", "dp4", 0).total > 2 * move("dp4", "dp4", 0).total


def test_between_nodes_it_takes_longer(move: Callable[..., Cost]) -> None:
    assert move("tp8", "tp8", 0, nodes=2).total > 4 * move("tp4", "tp4", 0).total


def test_experience_pays_latency_and_bandwidth(a100s: Callable[[int], Cluster], fixed: Workload) -> None:
    near, far = AnalyticModel(a100s(1), fixed, "bf16"), AnalyticModel(a100s(2), fixed, "bf16")
    assert 0 < near.transfer_seconds(0).total < near.transfer_seconds(1e9).total < far.transfer_seconds(1e9).total


def test_weights_are_read_back_once_over_the_link_to_the_host(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], llama: ModelSpec, fixed: Workload
) -> None:
    cluster = a100s(1)
    model = AnalyticModel(cluster, fixed, "bf16")
    kept, away = (
        model.seconds(query("ref_logprob", "tp2,dp4", 4, offload=what)) for what in Offload if what != "optimizer"
    )
    assert away.terms[:-1] == kept.terms
    assert away.terms[-1].name == "reload"
    bandwidth = cluster.host.bytes_per_second * efficiency_of("cuda", "a100-80gb").transfer_bytes
    expected = 2 * llama.shard(2).num_params / bandwidth + 6 * 32 * cluster.host.seconds
    assert away.terms[-1].amount == pytest.approx(expected)


def test_an_optimizer_is_read_before_the_stage_and_written_behind_it(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], fixed: Workload
) -> None:
    model = AnalyticModel(a100s(1), fixed, "bf16")
    kept, away = (model.seconds(query("actor_train", "dp8", offload=what)) for what in Offload if what != "weights")
    assert away.terms[:-2] == kept.terms
    assert [term.name for term in away.terms[-2:]] == ["reload", "offload"]
    assert away.terms[-2].amount == away.terms[-1].amount > 1


def test_replicas_share_what_the_optimizer_moves(
    a100s: Callable[[int], Cluster], query: Callable[..., StageQuery], fixed: Workload
) -> None:
    model = AnalyticModel(a100s(1), fixed, "bf16")
    moved = [
        sum(t.amount for t in model.seconds(query("actor_train", f"dp{dp}", offload=Offload.OPTIMIZER)).terms[-2:])
        for dp in (1, 2, 4, 8)
    ]
    assert moved == sorted(moved, reverse=True)


def test_a_loader_is_given_every_tensor_whole(
    a100s: Callable[[int], Cluster], llama: ModelSpec, fixed: Workload
) -> None:
    """However many ranks receive it and whatever they keep; parts are sent to where they are read."""

    def refit(engine: str, target: str, *, generates: bool = True) -> Cost:
        asked = AnalyticModel(a100s(2), fixed, "bf16", engine=engine_named(engine))
        layouts = {"source": Layout(dp=8), "target": Layout.parse(target)}
        return asked.refit_seconds(RefitQuery(model=llama, overlap=0, generates=generates, **layouts))

    whole = next(term.amount for term in refit("vllm", "tp8").terms if term.name == "weight bytes")
    assert whole == pytest.approx(2 * llama.num_params / (25e9 * 0.96))
    assert refit("vllm", "tp8") == refit("sglang", "dp8") == refit("trtllm", "tp4,dp2")
    assert refit("meshwright-graph", "tp8").total < refit("meshwright-graph", "dp8").total
    assert refit("meshwright-graph", "tp8").total < refit("vllm", "tp8").total
    assert refit("vllm", "tp8", generates=False) == refit("meshwright-eager", "tp8")


def test_every_expert_is_a_message_of_its_own(a100s: Callable[[int], Cluster], llama: ModelSpec) -> None:
    mixture = replace(llama, experts=Experts(num_experts=8, experts_per_token=2, ffn_size=1024))
    dense, mixed = (
        refit_seconds(
            RefitQuery(model=model, source=Layout(), target=Layout(), overlap=0, generates=True),
            a100s(1),
            efficiency_of("cuda", "a100-80gb"),
            2,
            trainer=own_framework("cuda"),
            engine=engine_named("vllm"),
        )
        for model in (llama, mixture)
    )
    assert mixed.amount("weight messages") == pytest.approx((6 + 3 * 8) / 6 * dense.amount("weight messages"))


def test_a_trainer_that_gathers_slowly_and_a_loader_that_takes_time_for_each_tensor_decide(
    a100s: Callable[[int], Cluster], llama: ModelSpec, fixed: Workload
) -> None:
    query, engine = (
        RefitQuery(model=llama, source=Layout(), target=Layout(), overlap=0, generates=True),
        engine_named("vllm"),
    )
    slow = own_framework("cuda").model_copy(update={"gather_bytes_per_second": 1e9})
    patient = engine.model_copy(update={"refit": engine.refit.model_copy(update={"tensor_seconds": 1.0})})
    moved = AnalyticModel(a100s(1), fixed, "bf16", framework=slow, engine=patient).refit_seconds(query)
    assert moved.amount("weight bytes") == pytest.approx(2 * llama.num_params / 1e9)
    assert moved.amount("weight messages") == pytest.approx(6 * llama.num_layers, rel=1e-3)


def test_weights_that_become_8_bit_floats_are_moved_whole_and_read_twice_more(
    a100s: Callable[[int], Cluster], llama: ModelSpec, fixed: Workload
) -> None:
    whole = RefitQuery(model=llama, source=Layout.parse("tp2"), target=Layout.parse("tp4"), overlap=0)
    ask = AnalyticModel(a100s(1), fixed, "bf16").refit_seconds
    moved, (*rest, quantising) = ask(whole).terms, ask(replace(whole, quantises=True)).terms
    assert tuple(rest) == moved
    assert quantising.name == "quantising"
    bandwidth = a100s(1).device.memory_bytes_per_second * efficiency_of("cuda", "a100-80gb").elementwise_bytes
    of_layers = linears_of(llama).num_weights * llama.num_layers
    assert quantising.amount == pytest.approx(5 * of_layers / 4 / bandwidth)
