"""The runs that are predicted: the tiny job with another batch, other lengths and another layout than was profiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.profiles.algorithms import PPO_GRAPH


@dataclass(frozen=True, kw_only=True)
class Variation:
    """`workload` replaces keys of the job's workload; `pins` fix the plan."""

    name: str
    workload: dict[str, Any]
    pins: tuple[str, ...]


def _every(key: str, value: str, *, only_training: bool = False) -> tuple[str, ...]:
    """A pin for each stage that has a choice of this, or for those that train."""
    stages = [stage for stage in PPO_GRAPH.stages if stage.trains or not only_training]
    return tuple(f"{s.name}.{key}={value}" for s in stages if not (s.generates and key == "micro_batch_size"))


_PROMPT = {"max": 48, "median": 23, "p99": 47}

VARIATIONS = (
    Variation(
        name="32 rows on two replicas",
        workload={"batch_size": 32, "prompt": _PROMPT, "response": {"max": 80, "median": 25, "p99": 120}},
        pins=(*_every("layout", "tp1,pp1,dp2"), *_every("micro_batch_size", "8")),
    ),
    Variation(
        name="96 rows of short responses, tensor parallel",
        workload={
            "batch_size": 96,
            "prompt": _PROMPT,
            "response": {"max": 40, "median": 25, "p99": 120},
            "num_minibatches": 3,
        },
        pins=(*_every("layout", "tp2,pp1,dp1"), *_every("micro_batch_size", "16")),
    ),
    Variation(
        name="48 rows, pipeline parallel",
        workload={"batch_size": 48, "prompt": _PROMPT, "response": {"max": 64, "median": 25, "p99": 120}},
        pins=(*_every("layout", "tp1,pp2,dp1"), *_every("micro_batch_size", "4")),
    ),
    Variation(
        name="64 rows, actor and critic apart",
        workload={"batch_size": 64, "prompt": _PROMPT, "response": {"max": 56, "median": 25, "p99": 120}},
        pins=(
            *(f"{s.name}.pool={0 if s.role in ('actor', 'ref') else 1}:1" for s in PPO_GRAPH.stages),
            *_every("layout", "tp1,pp1,dp1"),
            *_every("micro_batch_size", "16"),
        ),
    ),
    Variation(
        name="40 rows of long responses, recomputed",
        workload={
            "batch_size": 40,
            "prompt": _PROMPT,
            "response": {"max": 120, "median": 25, "p99": 120},
            "num_minibatches": 2,
        },
        pins=(
            *_every("layout", "tp1,pp1,dp2", only_training=True),
            *_every("recompute", "full", only_training=True),
            *_every("micro_batch_size", "10"),
        ),
    ),
)
