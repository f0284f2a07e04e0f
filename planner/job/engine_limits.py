"""The engines among which the plan of a job chooses, and the jobs for which `run` can generate with vLLM or SGLang.

Everything here is known from the facts of a job, before a plan is searched; `planner/plan/engine_rules.py` has the
rules that layouts and schedules follow.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.job.job import AUTO, Facts, Job
from meshwright.profiles.frameworks import OWN_ENGINES, SGLANG, VLLM, EngineName, own_engine
from meshwright.profiles.stages import Role

VLLM_FAMILIES = (
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Gemma",
    "Olmo2",
    "Phi3",
    "Granite",
    "Glm4",
    "SmolLM3",
    "Ministral",
)
"""The families whose greedy responses from vLLM are compared with transformers
(`tests/runtime/inference/test_replica_engines.py`)."""
VLLM_EXPERT_FAMILIES = ("Mixtral", "Qwen2Moe", "Qwen3Moe")
"""The families with experts that are compared in the same way."""
_EXPERT_MULTIPLE = 32
"""The hidden size must be a multiple of this for the expert kernels on a CPU (experts/cpu_moe.py of vLLM 0.32)."""
_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The sizes of a head that attention on a CPU has (v1/attention/backends/cpu_attn.py of vLLM 0.32)."""
MAX_ADAPTER_RANK = 512
"""The largest rank of an adapter (config/lora.py of vLLM 0.32)."""
_OURS = f"plan the job with engine: {OWN_ENGINES[0]}"


def engines_of(job: Job, facts: Facts) -> tuple[EngineName, ...]:
    """Return the engines among which a plan of the job chooses: one, unless the job leaves the choice to the plan."""
    if job.engine != AUTO:
        return (facts.engine,)
    own = own_engine(facts.cluster.kind, has_experts=facts.models.actor.experts is not None)
    return own, *job.engines.named


def engine_violations(facts: Facts) -> Iterator[str]:
    """Yield a sentence for each thing that the facts of a job ask of their engine and that `run` does not do with it.

    Sentences call the engine "it"; they are printed after its name.
    """
    if facts.engine == VLLM:
        yield from vllm_violations(facts)
    if facts.engine == SGLANG:
        yield from sglang_violations(facts)


def sglang_violations(facts: Facts) -> Iterator[str]:
    """Yield a sentence for each thing that the facts of a job ask of SGLang and that `run` does not do with it."""
    yield from _mask_violations(facts)
    if facts.cluster.kind != "cuda":
        yield f"it does not install without CUDA, and the cluster is {facts.cluster.kind}; {_OURS}."
    if facts.models.actor.adapter:
        yield f"it takes whole weights only, and the actor is trained by an adapter; {_OURS}."
    if facts.generation_weights:
        yield f"its weights have the job's precision, and generation_weights is {facts.generation_weights}; {_OURS}."


def vllm_violations(facts: Facts) -> Iterator[str]:
    """Yield a sentence for each thing that the facts of a job ask of vLLM and that `run` does not do with it.

    Sentences call vLLM "it"; they are printed after the name of the engine.
    """
    actor = facts.models.spec(Role.ACTOR)
    if facts.cluster.kind != "cpu":
        yield f"it is started on CPUs only, and the cluster is {facts.cluster.kind}; {_OURS}, or export the plan."
    yield from _mask_violations(facts)
    families = (*VLLM_FAMILIES, *VLLM_EXPERT_FAMILIES)
    if actor.architecture not in {f"{family}ForCausalLM" for family in families}:
        yield f"it was tried with {', '.join(families)}, and the actor is {actor.architecture}; {_OURS}."
    if actor.experts and actor.hidden_size % _EXPERT_MULTIPLE:
        yield (
            f"its expert kernels on a CPU need a hidden size that is a multiple of {_EXPERT_MULTIPLE}, and the actor's "
            f"is {actor.hidden_size}; {_OURS}."
        )
    if actor.window:
        tokens = actor.window.num_tokens
        yield f"it was tried without a sliding window, and the actor has one of {tokens} tokens; {_OURS}."
    if actor.head_dim not in _HEAD_DIMS:
        sizes = ", ".join(map(str, _HEAD_DIMS))
        yield f"its attention on a CPU has heads of {sizes} elements, and the actor's have {actor.head_dim}; {_OURS}."
    if actor.adapter and actor.adapter.rank > MAX_ADAPTER_RANK:
        yield f"its adapters have ranks up to {MAX_ADAPTER_RANK}, and the actor's has {actor.adapter.rank}; {_OURS}."
    if actor.adapter and actor.experts:
        yield f"its adapters of models with experts need Triton, which it does not have on a CPU; {_OURS}."
    if actor.adapter and actor.architecture == "Glm4ForCausalLM" and "linear_fc1" in actor.adapter.targets:
        yield (
            "its adapters have separate gate and up projections, and a checkpoint of Glm4 stores both as one; remove "
            f"linear_fc1 from the adapter's targets, or {_OURS}."
        )
    if facts.generation_weights:
        yield f"its weights have the job's precision, and generation_weights is {facts.generation_weights}; {_OURS}."


def _mask_violations(facts: Facts) -> Iterator[str]:
    """A sentence if a job keeps sampling masks: this project asks no engine in another process for them."""
    if facts.workload.kept_tokens:
        yield f"it is not asked which tokens top_k and top_p leave, and the job keeps these sets; {_OURS}."
