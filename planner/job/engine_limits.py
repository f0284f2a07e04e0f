"""Engines that a plan may generate with: those that a job names, and what `run` does with vLLM.

Everything here is known from the facts of a job, before a plan is searched.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.job.job import AUTO, Facts, Job
from meshwright.profiles.frameworks import OWN_ENGINES, EngineName, own_engine
from meshwright.profiles.schedule import WhileWaiting
from meshwright.profiles.stages import GENERATE, Role

_ARCHITECTURES = tuple(f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma"))
"""The architectures whose greedy responses are compared with transformers
(`tests/runtime/inference/test_replica_engines.py`)."""
_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The sizes of a head that attention on a CPU has (v1/attention/backends/cpu_attn.py of vLLM 0.32)."""
_OURS = f"plan the job with engine: {OWN_ENGINES[0]}"


def engines_of(job: Job, facts: Facts) -> tuple[EngineName, ...]:
    """Return the engines among which a plan of the job chooses: one, unless the job leaves the choice to the plan."""
    if job.engine != AUTO:
        return (facts.engine,)
    own = own_engine(facts.cluster.kind, has_experts=facts.models.actor.experts is not None)
    return own, *job.engines.named


def vllm_violations(facts: Facts) -> Iterator[str]:
    """Yield a sentence for each thing that the facts of a job ask of vLLM and that `run` does not do with it."""
    actor = facts.models.spec(Role.ACTOR)
    if facts.cluster.kind != "cpu":
        yield f"it is started on CPUs only, and the cluster is {facts.cluster.kind}; {_OURS}, or export the plan."
    if actor.architecture not in _ARCHITECTURES:
        yield f"it was tried with {', '.join(_ARCHITECTURES)}, and the actor is {actor.architecture}; {_OURS}."
    if actor.window:
        tokens = actor.window.num_tokens
        yield f"it was tried without a sliding window, and the actor has one of {tokens} tokens; {_OURS}."
    if actor.head_dim not in _HEAD_DIMS:
        sizes = ", ".join(map(str, _HEAD_DIMS))
        yield f"its attention on a CPU has heads of {sizes} elements, and the actor's have {actor.head_dim}; {_OURS}."
    if actor.adapter:
        yield f"it gets whole weights, and the actor trains an adapter; {_OURS}."
    if facts.generation_weights:
        yield f"its weights have the job's precision, and generation_weights is {facts.generation_weights}; {_OURS}."


def vllm_pins(facts: Facts) -> tuple[str, ...]:
    """Return the pins that restrict a search to plans that `run` executes with vLLM."""
    pins = [f"{GENERATE}.tp=1", f"{GENERATE}.pp=1", *(f"{name}.chunk_tokens=0" for name in facts.graph.streaming)]
    if facts.cache_after_refit != "recompute":
        pins += [f"{GENERATE}.batches_in_flight=1", f"{GENERATE}.overcommit=0"]
    if facts.workload.turns:
        pins.append(f"{GENERATE}.while_waiting={WhileWaiting.LEAVE}")
    return tuple(pins)
