"""Refits that are costed together take what each takes alone, within one kind of nodes and between kinds."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from meshwright.cost_models.blended import cost_model
from meshwright.cost_models.protocol import CostModel, PlacedLayout, RefitTable
from meshwright.profiles.experts import Experts
from meshwright.profiles.frameworks import EngineName
from meshwright.profiles.hardware import Cluster, Link, MixedCluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.workload import Workload

SOURCES = tuple(
    map(Layout.parse, ("tp1,pp1,dp8", "tp4,pp2,dp2,sp", "tp8,pp3,dp1", "tp2,pp1,dp4,ep4", "tp2,pp2,dp1,cp2"))
)
TARGETS = tuple(map(Layout.parse, ("tp1,pp1,dp8", "tp8,pp1,dp1", "tp2,pp1,dp4,ep4", "tp4,pp2,dp2,ep2,sp")))


def table_of(model: ModelSpec, parts: range, *, generates: bool, quantises: bool) -> RefitTable:
    sources, targets = (tuple(PlacedLayout(*one) for one in product(parts, end)) for end in (SOURCES, TARGETS))
    rows = list(product(range(len(sources)), range(len(targets)), (0, 1, 8)))
    source_index, target_index, overlap = np.array(rows).T
    return RefitTable(
        model=model,
        sources=sources,
        targets=targets,
        source_index=source_index,
        target_index=target_index,
        overlap=overlap,
        generates=generates,
        quantises=quantises,
    )


def require_equal(model: CostModel, refits: RefitTable) -> None:
    together, alone = model.seconds_of_refits(refits), [model.refit_seconds(refit).total for refit in refits]
    assert len(together) == len(refits) > 0
    assert together == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("engine", [None, "vllm"])
@pytest.mark.parametrize("quantises", [False, True])
def test_refits_on_nodes_of_one_kind_take_together_what_each_takes_alone(
    a100s: Callable[[int], Cluster], llama: ModelSpec, fixed: Workload, engine: EngineName | None, quantises: bool
) -> None:
    mixture = replace(llama, experts=Experts(num_experts=8, experts_per_token=2, ffn_size=1024))
    for spec in (llama, mixture):
        refits = table_of(spec, range(1), generates=True, quantises=quantises)
        require_equal(cost_model(a100s(4), fixed, "bf16", engine=engine), refits)


def test_refits_between_kinds_of_nodes_take_together_what_each_takes_alone(
    a100s: Callable[[int], Cluster], llama: ModelSpec, fixed: Workload
) -> None:
    first = a100s(2)
    slower = first.model_copy(update={"inter_node": Link(seconds=1e-4, bytes_per_second=1e9)})
    cluster = MixedCluster(parts=(first, slower), between=Link(seconds=1e-3, bytes_per_second=5e9))
    refits = table_of(llama, range(3), generates=False, quantises=False)
    require_equal(cost_model(cluster, fixed, "bf16"), refits)
