"""A cost model that needs no measurement: datasheets, efficiencies and equations."""

from __future__ import annotations

from meshwright.cost_models.stage_cost import StageModel
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.efficiency import Efficiency
from meshwright.profiles.frameworks import Framework
from meshwright.profiles.workload import Workload


class AnalyticModel(StageModel):
    """Every term is analytic."""

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        precision: str,
        *,
        framework: Framework | None = None,
        efficiency: Efficiency | None = None,
    ) -> None:
        super().__init__(cluster, workload, precision, framework=framework, efficiency=efficiency)
