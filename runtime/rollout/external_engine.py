"""vLLM or SGLang as the engine of a run: what it cannot do is refused before a rank starts; each generating rank starts
one. A run has never generated with SGLang (`NOT_RUN`)."""

from __future__ import annotations

import os
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.planner.job.engine_limits import engine_violations
from meshwright.planner.job.job import Job
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.vllm_settings import engine_arguments
from meshwright.profiles.errors import BadInput, require_none
from meshwright.profiles.frameworks import OWN_ENGINES, SGLANG, VLLM, EngineName
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.adapter import Linear
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.packing import BLOCK_TOKENS
from meshwright.profiles.schedule import WhileWaiting
from meshwright.profiles.stages import GENERATE, Role
from meshwright.runtime.inference.engine_process import (
    MIN_ANSWER_SECONDS,
    SGLANG_SERVER,
    VLLM_SERVER,
    EngineAdapter,
    EngineProcess,
    EngineSettings,
    EngineShard,
)
from meshwright.runtime.inference.external_replica import stored_tensors
from meshwright.runtime.training.weight_copies import DTYPES, WeightCopy

VERSIONS: Mapping[EngineName, str] = {VLLM: "0.32.", SGLANG: "0.5."}
"""The beginning of the versions that are run: an engine's interface changes from release to release."""
_NAMES = {VLLM: "vLLM", SGLANG: "SGLang"}
_SERVERS = {VLLM: VLLM_SERVER, SGLANG: SGLANG_SERVER}

_VLLM_LINEARS: Mapping[Linear, str] = {
    "linear_qkv": "qkv_proj",
    "linear_proj": "o_proj",
    "linear_fc1": "gate_up_proj",
    "linear_fc2": "down_proj",
}

_FIND_VERSION = (
    "import sys\n"
    "from importlib.metadata import distributions\n"
    "names = {sys.argv[1], sys.argv[1] + '-cpu'}\n"
    "print(next((d.version for d in distributions() if d.metadata['Name'] in names), 'none'))"
)
_FIND_SECONDS = 120.0
"""Time limit of the question for the version, which takes a second or less."""
_SLACK = 5.0
"""A round is taken to hang when it takes longer than this multiple of the predicted seconds of a whole stage."""


def require_engine(plan: Plan, job: Job, directory: Path) -> None:
    """Check that an engine in its own process can run the job of its plan, and that its environment has the engine.

    Relative paths of the job start at `directory`. Raises BadInput otherwise.
    """
    engine = plan.facts.engine
    if engine in OWN_ENGINES:
        return
    require_none(plan_violations(plan), f"engine {engine}")
    if job.engines.of(engine) is None:
        raise BadInput(
            f"the plan is for engine {engine}, and the job does not say where it is: give engines: "
            f"{{{engine}: {{python: PATH}}}} with the interpreter of its environment, export the plan to a trainer "
            "that has it, or plan the job "
            f"with engine: {' or '.join(OWN_ENGINES)}."
        )
    require_version(engine, interpreter_of(engine, job, directory))


def plan_violations(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each thing that a plan asks of its engine and that `run` does not do with it."""
    yield from engine_violations(plan.facts)
    if plan.facts.engine != SGLANG:  # the verifier has the rules of plans for vLLM
        return
    layout, schedule = plan.placement(GENERATE).layout, plan.placement(GENERATE).schedule
    if layout.num_ranks > layout.dp:
        yield f"one process has a whole model, and actor_generate has layout={layout}; pin actor_generate.layout to dp."
    if schedule.keeps_in_flight and not plan.facts.workload.turns and plan.facts.cache_after_refit != "recompute":
        yield "it recomputes what sequences in flight have cached; give cache_after_refit: recompute."
    if plan.facts.workload.turns and schedule.while_waiting is WhileWaiting.KEEP:
        yield f"a sequence that waits gives up its slot; pin actor_generate.while_waiting={WhileWaiting.LEAVE}."


def require_version(engine: EngineName, python: Path) -> None:
    """Check that the environment of an interpreter has the version of an engine that is run. Raises BadInput
    otherwise."""
    version, name, runs = _version_in(engine, python), _NAMES[engine], VERSIONS[engine]
    if not version.startswith(runs):
        found = f"has no {name}" if version == "none" else f"has {name} {version}"
        builds = "; `make engines` builds one" if engine == VLLM else ""
        raise BadInput(
            f"engines.{engine}.python: the environment of {python} {found}, and meshwright runs {runs}x{builds}."
        )


def interpreter_of(engine: EngineName, job: Job, directory: Path) -> Path:
    """Return the interpreter of an engine in a job that names one.

    Links are not followed: through them an environment is known.
    """
    environment = job.engines.of(engine)
    assert environment is not None
    return Path(os.path.abspath(directory / environment.python))


def _version_in(engine: EngineName, python: Path) -> str:
    """Return the version of an engine in an environment, `none` if it has none. Raises BadInput if python does not
    run."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _FIND_VERSION, engine],
            capture_output=True,
            text=True,
            timeout=_FIND_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        builds = ", such as the one that `make engines` builds" if engine == VLLM else ""
        raise BadInput(
            f"engines.{engine}.python: {python} does not run ({reason}); give the interpreter of an environment with "
            f"{_NAMES[engine]}{builds}."
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
    require_none(plan_violations(plan), f"engine {facts.engine}")
    actor, workload, schedule = facts.models.spec(Role.ACTOR), facts.workload.wave, placement.schedule
    dtype, arguments = DTYPES[facts.precision], engine_arguments(facts, schedule)
    cached_tokens = (workload.cache_need(schedule, layout.dp).blocks + 1) * BLOCK_TOKENS  # one is the engine's own
    token_bytes = cached_token_bytes(actor, layout.tp, dtype)
    settings = EngineSettings(
        model=str((directory / job.models.source(Role.ACTOR).path).resolve()),
        config={"vocab_size": num_tokens},
        dtype=str(dtype).removeprefix("torch."),
        max_tokens=arguments.max_model_len,
        num_slots=arguments.max_num_seqs,
        max_round_tokens=arguments.max_num_batched_tokens,
        enable_chunked_prefill=arguments.enable_chunked_prefill,
        enable_prefix_caching=arguments.enable_prefix_caching,
        enforce_eager=arguments.enforce_eager,
        block_tokens=BLOCK_TOKENS,
        cache_bytes=cached_tokens * token_bytes,
        cache_tokens=cached_tokens,
        device=rank % facts.cluster.ranks_per_node,
        temperature=job.settings.temperature,
        shard=shard,
        adapter=engine_adapter(actor),
    )
    return EngineProcess(
        interpreter_of(facts.engine, job, directory),
        settings,
        log=out / f"engine-{rank}.log",
        rank=rank,
        num_threads=torch.get_num_threads(),
        server=_SERVERS[facts.engine],
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
