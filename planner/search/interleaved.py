"""Discards interleaved pipelines that cannot beat the plain pipeline, before they are costed in full.

Under the same schedule an interleaved pipeline holds the weights of the plain one and more activations, so it never
takes less memory (Korthikanti et al., arXiv:2205.05198, section 4.2.3). This holds only if all layers are alike: dense
layers before layers of experts are divided more evenly over more chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from meshwright.planner.solver import dominance
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Schedule


class PlainPipeline:
    """The costed choices of one plain pipeline on one kind of pool, with which its interleaved variants are compared.

    The plain pipeline has to be costed before the layouts that divide its pipeline stages into chunks.
    """

    def __init__(self, model: ModelSpec) -> None:
        self._applies = model.num_dense_layers in (0, model.num_layers)
        self._plain: Layout | None = None
        self._last_compared: tuple[Layout, bool] | None = None
        self._fitting: dict[Schedule, Sequence[float]] = {}
        self._too_large: dict[Schedule, str] = {}
        self._table: npt.NDArray[np.float64] | None = None

    def record(self, layout: Layout, schedule: Schedule, found: Sequence[float] | str) -> None:
        """Record a plain choice: its amounts (seconds and tail seconds first), or the reason why it is too large."""
        if not self._applies or layout.pp == 1:
            return
        if layout != self._plain:
            self._plain, self._fitting, self._too_large, self._table = layout, {}, {}, None
        if isinstance(found, str):
            self._too_large[schedule] = found
        else:
            self._fitting[schedule] = found

    def too_large(self, layout: Layout, schedule: Schedule) -> str | None:
        """Return why an interleaved choice is too large if the plain one under the same schedule is, else None."""
        return self._too_large.get(schedule) if self._is_variant(layout) else None

    def dominates(self, layout: Layout, schedule: Schedule, seconds: float) -> bool:
        """True if some plain choice is no slower than an interleaved one of these seconds, and no larger."""
        if not self._is_variant(layout) or schedule not in self._fitting:
            return False
        if self._table is None:
            amounts = list(self._fitting.values())
            self._table = np.array([amounts[index] for index in dominance.undominated(amounts)])
        lower_bounds = seconds, seconds, *self._fitting[schedule][2:]
        return dominance.is_dominated(lower_bounds, self._table)

    def _is_variant(self, layout: Layout) -> bool:
        if self._last_compared is None or self._last_compared[0] is not layout:
            self._last_compared = layout, replace(layout, vpp=1) == self._plain
        return self._last_compared[1]
