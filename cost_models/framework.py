"""How a framework runs a layer and an update: what changes costs and is not a choice of the planner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Framework:
    """The defaults are this project's runtime."""

    flash_attention: bool = True  # False: scores are written to memory, as before 2022
    cuda_graphs: bool = False  # True: a whole decode step is one launch
    sharded_optimizer: bool = True  # False: every replica reduces all gradients and updates all parameters
    overlapped_reduction: bool = False  # gradients are reduced during the backward pass
    overlapped_exchanges: bool = False  # tensor-parallel exchanges run beside the GEMMs that feed or use them
    gradient_bytes: int = 4  # of a reduced gradient


RUNTIME = Framework()
