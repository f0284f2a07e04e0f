"""Which interleaved pipelines cannot be of use beside the plain one, known before they are costed in full.

An interleaved pipeline holds the weights of the plain one and more activations (Korthikanti et al., arXiv:2205.05198,
section 4.2.3), so it never takes less memory under the same schedule. That is so where all layers are alike: dense
layers in front of layers of experts are dealt more evenly to more chunks.
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


class Beside:
    """The choices of one plain pipeline on one kind of pool, which come before those that cut it in chunks."""

    def __init__(self, model: ModelSpec) -> None:
        self._applies = model.num_dense_layers in (0, model.num_layers)
        self._plain: Layout | None = None
        self._asked: tuple[Layout, bool] | None = None
        self._fitting: dict[Schedule, Sequence[float]] = {}
        self._too_large: dict[Schedule, str] = {}
        self._table: npt.NDArray[np.float64] | None = None

    def note(self, layout: Layout, schedule: Schedule, found: Sequence[float] | str) -> None:
        """A plain choice has these amounts, seconds and those of its tail first, or is too large, and why."""
        if not self._applies or layout.pp == 1:
            return
        if layout != self._plain:
            self._plain, self._fitting, self._too_large, self._table = layout, {}, {}, None
        if isinstance(found, str):
            self._too_large[schedule] = found
        else:
            self._fitting[schedule] = found

    def too_large(self, layout: Layout, schedule: Schedule) -> str | None:
        """Why an interleaved choice is too large, where the plain one is."""
        return self._too_large.get(schedule) if self._is_beside(layout) else None

    def beats(self, layout: Layout, schedule: Schedule, seconds: float) -> bool:
        """Whether a plain choice is no slower than an interleaved one of these seconds, and no larger."""
        if not self._is_beside(layout) or schedule not in self._fitting:
            return False
        if self._table is None:
            amounts = list(self._fitting.values())
            self._table = np.array([amounts[index] for index in dominance.undominated(amounts)])
        least = seconds, seconds, *self._fitting[schedule][2:]
        return dominance.beaten(least, self._table)

    def _is_beside(self, layout: Layout) -> bool:
        if self._asked is None or self._asked[0] is not layout:
            self._asked = layout, replace(layout, vpp=1) == self._plain
        return self._asked[1]
