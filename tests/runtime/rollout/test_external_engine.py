"""vLLM or SGLang as the engine of a run: what does not run with it is refused by name, and so is a wrong
environment."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.job.engine_environments import EngineEnvironment, EngineEnvironments
from meshwright.planner.job.engine_limits import MAX_ADAPTER_RANK
from meshwright.planner.job.job import Job, read_job, resolve
from meshwright.planner.job.sections import ClusterSpec
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.errors import BadInput
from meshwright.profiles.experts import Experts
from meshwright.profiles.frameworks import SGLANG, VLLM
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_parts.adapter import ATTENTION_LINEARS, Adapter
from meshwright.profiles.model_parts.hf_config import SlidingWindow
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import GENERATE
from meshwright.runtime.inference.engine_server import LORA_RANKS
from meshwright.runtime.rollout.external_engine import VERSIONS, require_engine
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.inference.vllm_environment import VLLM_PYTHON, needs_vllm
from tests.runtime.plans_by_hand import Where, plan_by_hand
from tests.runtime.small_job import VOCAB_SIZE, write_job


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Job, Path]:
    """A plan for vLLM on two ranks in which nothing is wrong but that its environment is not given."""
    path = write_job(tmp_path_factory.mktemp("job"), num_ranks=2)
    write_checkpoint(path.parent / "actor", vocab_size=VOCAB_SIZE, head_dim=32)
    job = read_job(path).model_copy(update={"engine": "vllm"})
    plan = plan_by_hand(resolve(job, path.parent), {GENERATE: Where("0:2", "dp2"), "other": Where("0:1")})
    return plan, job, path.parent


def with_python(job: Job, python: str) -> Job:
    engines = EngineEnvironments(vllm=EngineEnvironment(python=python))
    return job.model_copy(update={"engines": engines})


def with_facts(plan: Plan, **changes: Any) -> Plan:
    return plan.model_copy(update={"facts": plan.facts.model_copy(update=changes)})


def with_actor(plan: Plan, **changes: Any) -> Plan:
    models = plan.facts.models
    return with_facts(plan, models=models.model_copy(update={"actor": replace(models.actor, **changes)}))


EXPERTS = Experts(num_experts=4, experts_per_token=2, ffn_size=96)
CHANGED: Mapping[str, tuple[Callable[[Plan], Plan], str]] = {
    "architecture": (lambda plan: with_actor(plan, architecture="PhiForCausalLM"), "and the actor is PhiForCausalLM"),
    "heads": (lambda plan: with_actor(plan, head_dim=16), "elements, and the actor's have 16"),
    "window": (
        lambda plan: with_actor(plan, window=SlidingWindow(num_tokens=32)),
        "the actor has one of 32 tokens",
    ),
    "adapter": (
        lambda plan: with_actor(plan, adapter=Adapter(rank=513, alpha=8.0)),
        "its adapters have ranks up to 512, and the actor's has 513",
    ),
    "gates of an adapter": (
        lambda plan: with_actor(plan, architecture="Glm4ForCausalLM", adapter=Adapter(rank=4, alpha=8.0)),
        "remove linear_fc1 from the adapter's targets",
    ),
    "an adapter beside experts": (
        lambda plan: with_actor(plan, experts=EXPERTS, adapter=Adapter(rank=4, alpha=8.0, targets=ATTENTION_LINEARS)),
        "its adapters of models with experts need Triton",
    ),
    "experts of another size": (
        lambda plan: with_actor(plan, architecture="MixtralForCausalLM", experts=EXPERTS, hidden_size=48),
        "its expert kernels on a CPU need a hidden size that is a multiple of 32, and the actor's is 48",
    ),
    "8 bits": (lambda plan: with_facts(plan, generation_weights="fp8"), "generation_weights is fp8"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_does_not_run_is_refused_by_name(name: str, whole: tuple[Plan, Job, Path]) -> None:
    (plan, job, directory), (change, says) = whole, CHANGED[name]
    with pytest.raises(BadInput, match=f"^engine vllm: .*{re.escape(says)}"):
        require_engine(change(plan), job, directory)


def test_every_rank_of_an_adapter_that_is_not_refused_fits() -> None:
    assert LORA_RANKS[-1] == MAX_ADAPTER_RANK


def test_a_gpu_is_refused(whole: tuple[Plan, Job, Path]) -> None:
    plan, job, directory = whole
    cluster = ClusterSpec(device="a100-80gb").resolve()
    with pytest.raises(BadInput, match="started on CPUs only, and the cluster is cuda"):
        require_engine(with_facts(plan, cluster=cluster), job, directory)


@pytest.mark.parametrize("setting", [{"top_k": 5}, {"top_p": 0.5}, {"stop": ("x",)}, {"temperature": 0.5}])
def test_settings_of_sampling_are_not_refused(setting: dict[str, Any], whole: tuple[Plan, Job, Path]) -> None:
    plan, job, directory = whole
    changed = job.model_copy(update={"ppo": job.settings.model_copy(update=setting)})
    with pytest.raises(BadInput, match="does not say where it is"):
        require_engine(plan, changed, directory)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_job_that_keeps_sampling_masks_is_refused(engine: str, whole: tuple[Plan, Job, Path]) -> None:
    plan, job, directory = whole
    workload = plan.facts.workload.model_copy(update={"kept_tokens": 8})
    with pytest.raises(BadInput, match="it is not asked which tokens top_k and top_p leave, and the job keeps these"):
        require_engine(with_facts(plan, engine=engine, workload=workload), job, directory)


def test_a_job_that_does_not_say_where_the_engine_is_gets_the_key(whole: tuple[Plan, Job, Path]) -> None:
    with pytest.raises(BadInput, match=re.escape("give engines: {vllm: {python: PATH}}")):
        require_engine(*whole)


@pytest.mark.parametrize(
    ("python", "says"),
    [
        ("no/python", "/no/python does not run (No such file or directory); give the interpreter"),
        ("/bin/false", "/bin/false does not run (CalledProcessError)"),
        (sys.executable, f"has no vLLM, and meshwright runs {VERSIONS[VLLM]}x; `make engines` builds one"),
    ],
)
def test_an_environment_that_is_none_is_refused(python: str, says: str, whole: tuple[Plan, Job, Path]) -> None:
    plan, job, directory = whole
    with pytest.raises(BadInput, match=re.escape(says)):
        require_engine(plan, with_python(job, python), directory)


def test_our_own_engine_needs_no_environment(whole: tuple[Plan, Job, Path]) -> None:
    plan, job, directory = whole
    require_engine(with_facts(plan, engine="meshwright-eager"), job, directory)


@pytest.mark.check_all
@needs_vllm
def test_the_environment_of_make_engines_is_the_one_that_runs(whole: tuple[Plan, Job, Path]) -> None:
    plan, job, directory = whole
    require_engine(plan, with_python(job, str(VLLM_PYTHON)), directory)


SGLANG_CHANGED: Mapping[str, tuple[Callable[[Plan], Plan], str]] = {
    "a CPU": (
        lambda plan: with_facts(plan, cluster=ClusterSpec(device="local").resolve()),
        "does not install without CUDA",
    ),
    "an adapter": (lambda plan: with_actor(plan, adapter=Adapter(rank=4, alpha=8.0)), "takes whole weights only"),
    "8 bits": (lambda plan: with_facts(plan, generation_weights="fp8"), "generation_weights is fp8"),
    "shards": (
        lambda plan: with_generation(plan, layout=Layout(tp=2)),
        "one process has a whole model, and actor_gene",
    ),
    "batches in flight": (
        lambda plan: with_generation(plan, schedule=Schedule(generation_slots=4, batches_in_flight=2)),
        "give cache_after_refit: recompute",
    ),
}


def with_generation(plan: Plan, **changes: Any) -> Plan:
    """The plan with another placement of generation."""
    placements = [p.model_copy(update=changes) if p.stage == GENERATE else p for p in plan.placements]
    return plan.model_copy(update={"placements": tuple(placements)})


@pytest.fixture
def on_sglang(whole: tuple[Plan, Job, Path]) -> tuple[Plan, Job, Path]:
    """The same plan on GPUs, for SGLang."""
    plan, job, directory = whole
    return with_facts(plan, engine=SGLANG, cluster=ClusterSpec(device="a100-80gb").resolve()), job, directory


@pytest.mark.parametrize("name", SGLANG_CHANGED)
def test_what_is_not_done_with_sglang_is_refused_by_name(name: str, on_sglang: tuple[Plan, Job, Path]) -> None:
    (plan, job, directory), (change, says) = on_sglang, SGLANG_CHANGED[name]
    with pytest.raises(BadInput, match=f"^engine sglang: .*{re.escape(says)}"):
        require_engine(change(plan), job, directory)


def test_sglang_needs_an_environment_that_has_it(on_sglang: tuple[Plan, Job, Path]) -> None:
    plan, job, directory = on_sglang
    with pytest.raises(BadInput, match=re.escape("give engines: {sglang: {python: PATH}}")):
        require_engine(plan, job, directory)
    named = job.model_copy(update={"engines": EngineEnvironments(sglang=EngineEnvironment(python=sys.executable))})
    with pytest.raises(BadInput, match=re.escape(f"has no SGLang, and meshwright runs {VERSIONS[SGLANG]}x.")):
        require_engine(plan, named, directory)
