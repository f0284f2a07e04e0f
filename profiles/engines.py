"""What generates responses: how its decode steps, its prefills and its refits are costed.

From `data/engines.yaml`, sourced and dated there; decode steps and prefills are those of a framework.
"""

from __future__ import annotations

from functools import cache, cached_property
from importlib.resources import as_file, files
from typing import Literal, TypeAlias, get_args

from pydantic import Field

from meshwright.profiles.documents import Document, read_yaml
from meshwright.profiles.errors import BadInput, suggestion
from meshwright.profiles.frameworks import Framework, framework_named

EngineName: TypeAlias = Literal["meshwright-eager", "meshwright-graph", "vllm", "sglang", "trtllm"]

EAGER: EngineName = "meshwright-eager"
GRAPH: EngineName = "meshwright-graph"

OWN: tuple[EngineName, ...] = (EAGER, GRAPH)
"""Those that this project runs; the others generate for other trainers."""


class EngineRefit(Document):
    """How an engine is given new weights."""

    in_place: bool = Field(
        description="each rank receives what it holds, where that is read; else all whole tensors pass its loader"
    )


class Engine(Document):
    """Facts of what generates."""

    framework: str = Field(description="whose decode steps and prefills it has")
    refit: EngineRefit
    source: str = Field(min_length=1)

    @cached_property
    def passes(self) -> Framework:
        """How its decode steps and prefills run."""
        return framework_named(self.framework)


class _Engines(Document):
    engines: dict[EngineName, Engine]


def engine_named(name: str) -> Engine:
    """The facts of an engine. Raises BadInput for an unknown name."""
    known = {str(engine): facts for engine, facts in _engines().items()}
    if name not in known:
        raise BadInput(f"engine {name!r} is not known; {suggestion(name, known)}")
    return known[name]


def own_engine(kind: str, *, has_experts: bool) -> EngineName:
    """What `run` generates with on devices of a kind (cuda or cpu), by a model with experts or without: decode steps
    are recorded on a GPU, and not where the host routes tokens to experts."""
    return GRAPH if kind == "cuda" and not has_experts else EAGER


def require_possible_engine(name: EngineName, kind: str, *, has_experts: bool) -> None:
    """Raises BadInput for decode steps that are to be recorded and cannot be."""
    if name != GRAPH or own_engine(kind, has_experts=has_experts) == GRAPH:
        return
    why = "the host routes tokens to experts" if kind == "cuda" else "a CPU has no graphs"
    raise BadInput(f"engine={GRAPH} records decode steps on a GPU, and {why}; use {EAGER}.")


def require_own_engine(name: EngineName) -> None:
    """Raises BadInput for an engine that this project does not run."""
    if name not in OWN:
        raise BadInput(
            f"the plan is for engine {name}, which meshwright does not run; export it to a trainer that does, or plan "
            f"the job with engine: {' or '.join(OWN)}."
        )


@cache
def _engines() -> dict[EngineName, Engine]:
    with as_file(files("meshwright.profiles") / "data" / "engines.yaml") as path:
        found = read_yaml(_Engines, path, "engines").engines
    assert set(found) == set(get_args(EngineName)), found
    return found
