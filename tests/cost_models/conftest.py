"""Llama-2 7B on A100s, with lengths that a test can change."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshwright.cost_models.compute import AnalyticShard
from meshwright.cost_models.kernels import Kernels
from meshwright.cost_models.protocol import StageQuery
from meshwright.profiles.aiconfigurator import Operators
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.efficiency import efficiency_of
from meshwright.profiles.hardware import Cluster, device_named, network_named
from meshwright.profiles.harness import exchanges, points, record, record_collective
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec, model_from_config
from meshwright.profiles.schedule import Recompute, Schedule
from meshwright.profiles.stages import Role
from meshwright.profiles.table import Table
from meshwright.profiles.workload import Workload
from tests.cost_models.measurements.operators import EFFICIENCY, operators_by
from tests.cost_models.tables import PROVENANCE, sample

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def llama() -> ModelSpec:
    return model_from_config(LLAMA_2_7B, name="llama-2-7b")


@pytest.fixture
def a100s() -> Callable[[int], Cluster]:
    def of(nodes: int) -> Cluster:
        device, intra_node, host = device_named("a100-80gb")
        return Cluster(
            nodes=nodes,
            ranks_per_node=8,
            device=device,
            intra_node=intra_node,
            inter_node=network_named("ib-hdr-200"),
            host=host,
            host_memory_bytes=2**40,
        )

    return of


@pytest.fixture
def long_tail() -> Workload:
    return Workload(
        batch_size=512,
        prompt=LengthSpec(max=512, median=128, p99=500),
        response=LengthSpec(max=2048, median=256, p99=1800),
        num_minibatches=2,
    )


@pytest.fixture
def fixed() -> Workload:
    """64 prompts of 100 tokens, 28 tokens generated for each."""
    return Workload(batch_size=64, prompt=LengthSpec(max=100, fixed=100), response=LengthSpec(max=28, fixed=28))


@pytest.fixture
def query(llama: ModelSpec) -> Callable[..., StageQuery]:
    """A query on Llama-2 7B: stage, layout, micro-batch, recomputation, slots, and settings of its schedule by name."""

    def of(
        stage: str,
        layout: str = "tp1",
        mbs: int = 1,
        recompute: str = "none",
        *,
        slots: int = 0,
        model: ModelSpec = llama,
        **settings: Any,
    ) -> StageQuery:
        schedule = Schedule(micro_batch_size=mbs, recompute=Recompute(recompute), generation_slots=slots, **settings)
        return StageQuery(stage=PPO_GRAPH.by_name[stage], model=model, layout=Layout.parse(layout), schedule=schedule)

    return of


@pytest.fixture
def shallow(llama: ModelSpec) -> dict[Role, ModelSpec]:
    """Two layers of Llama-2 7B, a depth that is measured."""
    scalar = {Role.ACTOR: False, Role.REF: False, Role.CRITIC: True, Role.REWARD: True}
    return {role: replace(llama, num_layers=2, scalar_head=head) for role, head in scalar.items()}


@pytest.fixture
def table(shallow: dict[Role, ModelSpec], fixed: Workload, a100s: Callable[[int], Cluster]) -> Table:
    """Twice what the equations say, at every point."""
    rows = []
    for point in points(PPO_GRAPH, shallow, fixed, a100s(1)):
        model = point.shape.model(num_layers=point.num_layers, max_positions=4096)
        shard = AnalyticShard(model, a100s(1).device, "bf16", efficiency_of("cuda", "a100-80gb"), 1.0)
        time = shard.time(point.timed_pass, point.rows, point.tokens, point.context)
        rows.append(record(point, sample(2 * (point.num_layers * time.layer + time.ends))))
    collectives = [record_collective(e, sample(1e-3 + e.num_bytes * 1e-10)) for e in exchanges(a100s(1))]
    return Table(provenance=PROVENANCE, measurements=tuple(rows), collectives=tuple(collectives))


@pytest.fixture
def laws(a100s: Callable[[int], Cluster]) -> Kernels:
    device = a100s(1).device
    return Kernels(device, EFFICIENCY, flops_per_second=device.flops_per_second["bf16"], weight_bytes=2, size=2)


@pytest.fixture
def operators(laws: Kernels) -> Operators:
    return operators_by(laws)
