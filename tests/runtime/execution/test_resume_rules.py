"""Of a job that is resumed with, every field takes effect or is refused in one sentence."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from meshwright.planner.job.algorithm_settings import Distill
from meshwright.planner.job.engine_environments import EngineEnvironment, EngineEnvironments
from meshwright.planner.job.evaluation import EvaluationSet
from meshwright.planner.job.job import DEFAULT_SETTINGS, JOB_KINDS, Job, read_job
from meshwright.planner.job.rewards_and_tools import Reward, Tool
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.documents import Document, parse
from meshwright.profiles.environment.dynamic_sampling import DynamicSampling
from meshwright.profiles.environment.latency import LatencySpec, MeasuredCalls
from meshwright.profiles.environment.turns import ToolTurns
from meshwright.profiles.errors import BadInput
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.speculation import Speculation
from meshwright.profiles.stages import TEACHERS
from meshwright.profiles.workload import Images
from meshwright.runtime.execution.resume import RULES, Effect, changes, rule_of, sampling_digests
from meshwright.runtime.records.run_directory import RunFile
from tests.runtime.small_job import request as request_of
from tests.runtime.small_job import write_job

Leaf: TypeAlias = tuple[str, Any]
"""A key, and the type of its value."""


def fields_of(kind: type[Document]) -> dict[str, FieldInfo]:
    """Those of a document, and of a job with the settings of any algorithm."""
    fields = dict(kind.model_fields)
    for member in JOB_KINDS if kind is Job else ():
        fields = {**member.model_fields, **fields}
    return fields


def leaves(kind: Any, *keys: str) -> Iterator[Leaf]:
    """Those of a document and of its members; a choice between documents is one leaf."""
    kind = without_none(kind)
    if isinstance(kind, type) and issubclass(kind, Document):
        for name, field in fields_of(kind).items():
            yield from leaves(field.annotation, *keys, name)
    else:
        yield ".".join(keys), kind


def without_none(kind: Any) -> Any:
    members = [member for member in get_args(kind) if member is not types.NoneType]
    return members[0] if get_origin(kind) in (Union, types.UnionType) and len(members) == 1 else kind


def another(kind: Any, value: Any = None) -> Any:
    """A value of this type that is not this one."""
    if get_origin(kind) is Annotated:
        return another(get_args(kind)[0], value)
    if get_origin(kind) is Literal:
        return next(one for one in get_args(kind) if one != value)
    if get_origin(kind) is tuple:
        first, *rest = get_args(kind)
        return (another(first),) if rest == [...] else tuple(map(another, (first, *rest)))
    if get_origin(kind) in (Union, types.UnionType):
        named = [member for member in get_args(kind) if get_origin(member) is Literal]
        return another(named[0], value) if named else "local"  # of clusters
    of_kinds: dict[Any, Callable[[], Any]] = {
        Mapping: lambda: {**(value or {}), "prompt": another(get_args(kind)[1])},
        EvaluationSet: lambda: EvaluationSet(prompts="another"),
        str: lambda: "another",
        Reward: lambda: Reward(name="another", function="exact_match"),
        bool: lambda: not value,
        int: lambda: (value or 0) + 1,
        float: lambda: (value or 0.0) + 0.5,
    }
    return of_kinds[get_origin(kind) or kind]()


LEAVES = tuple(leaves(Job))
MEASURED = LatencySpec(
    max=1.0, histogram=((0.5, 2.0),), measured=MeasuredCalls(num_calls=2, num_failed=0, date="2026-11-25")
)
TURNS = ToolTurns(
    number=LengthSpec(max=2, fixed=2), result=LengthSpec(max=2, fixed=2), latency_seconds=MEASURED, max_tokens=8
)
IMAGES = Images(number=LengthSpec(max=1, fixed=1), tokens=LengthSpec(max=2, fixed=2))
RULED = [
    pytest.param(key, kind, id=key)
    for key, kind in LEAVES
    if rule_of(key) and (".adapter." not in key or key.startswith("models.actor."))  # others have none
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), num_ranks=1)


@pytest.fixture(scope="module")
def plan(path: Path) -> Plan:
    return request_of(path, path.with_name("run")).plan


@pytest.fixture
def asked(path: Path, request: pytest.FixtureRequest) -> RunFile:
    """Of a job of the algorithm that has settings under the key that is asked about; of PPO for all others, with an
    adapter of the actor where its models are asked about, with turns where they or their tool are, and with images,
    dynamic sampling or the environment of an engine where that is."""
    job, called = read_job(path), getattr(request.node, "callspec", None)
    key = called.params["key"] if called else ""
    own = "grpo" if key.startswith("workload.dynamic_sampling.") else key.partition(".")[0]
    if own in ("grpo", "rloo", "reinforce"):
        job = with_settings(job, own)
    if key.startswith(("distill.", "models.teacher")):
        models = {role: {"path": "actor"} for role in ("actor", *TEACHERS)}
        written = job.model_dump(mode="json", exclude={"ppo": True})
        settings = Distill().model_dump(mode="json")
        job = parse(Job, json.dumps({**written, "algorithm": "distill", "models": models, "distill": settings}), "job")
    elif own == "models":
        actor = job.models.actor.model_copy(update={"adapter": Adapter(rank=2, alpha=2.0)})
        job = job.model_copy(update={"models": job.models.model_copy(update={"actor": actor})})
    if key.startswith("engines."):
        engines = EngineEnvironments(**dict.fromkeys(("vllm", "sglang"), EngineEnvironment(python="bin/python")))
        job = job.model_copy(update={"engines": engines})
    if key.startswith(("tool.", "workload.turns.")):
        workload = job.workload.model_copy(update={"turns": TURNS})
        job = job.model_copy(update={"tool": Tool(function="calculator"), "workload": workload})
    if key.startswith("workload.images."):
        workload = job.workload.model_copy(update={"images": IMAGES})
        job = job.model_copy(update={"workload": workload})
    if key.startswith("workload.speculation."):
        workload = job.workload.model_copy(update={"speculation": Speculation(acceptance=(0.25,))})
        job = job.model_copy(update={"workload": workload})
    if key.startswith("workload.dynamic_sampling."):
        workload = job.workload.model_copy(update={"dynamic_sampling": DynamicSampling(acceptance=0.5)})
        job = job.model_copy(update={"workload": workload})
    return RunFile(job=job, directory=str(path.parent), prompts="as they were")


def with_settings(job: Job, key: str) -> Job:
    """A job of PPO as one of the algorithm that has its settings under the key."""
    written = job.model_dump(mode="json", exclude={"ppo": True, "models": {"critic"}})
    written["workload"]["group_size"] = 4
    settings = DEFAULT_SETTINGS[key].model_dump(mode="json")
    algorithm = "reinforce++" if key == "reinforce" else key
    return parse(Job, json.dumps({**written, "algorithm": algorithm, key: settings}), "job")


def with_another(document: Any, kind: Any, key: str) -> Any:
    """The document with another value of one key."""
    name, _, rest = key.partition(".")
    inner = getattr(document, name)
    return document.model_copy(update={name: with_another(inner, kind, rest) if rest else another(kind, inner)})


def test_every_field_of_a_job_has_a_rule() -> None:
    assert [key for key, _ in LEAVES if rule_of(key) is None] == []
    assert [rule for rule in RULES if not any(f"{key}.".startswith(f"{rule}.") for key, _ in LEAVES)] == []


def optional(kind: Any, *keys: str) -> Iterator[str]:
    """The keys of documents that a document may lack."""
    if isinstance(kind, type) and issubclass(kind, Document):
        for name, field in fields_of(kind).items():
            inside = without_none(field.annotation)
            if inside is not field.annotation and isinstance(inside, type) and issubclass(inside, Document):
                yield ".".join((*keys, name))
            yield from optional(inside, *keys, name)


def test_what_a_job_may_lack_as_a_whole_has_a_rule() -> None:
    found = set(optional(Job))
    assert {"data", "workload.turns", "tool"} <= found
    assert [key for key in sorted(found) if rule_of(key) is None and key not in DEFAULT_SETTINGS] == []


@pytest.mark.parametrize(("key", "kind"), RULED)
def test_a_changed_field_is_named_or_refused_in_one_sentence(key: str, kind: Any, asked: RunFile) -> None:
    rule = rule_of(key)
    changed = (
        asked.model_copy(update={"job": with_settings(asked.job, "grpo")})
        if key == "algorithm"
        else with_another(asked, kind, f"job.{key}")
    )
    assert rule is not None
    if rule.effect is not Effect.NONE:
        found = [change.key for change in changes(asked, changed)]
        assert found
        assert all(one == key or one.startswith(f"{key}.") for one in found)
        return
    said = rf"^--resume: {key} is .* in the run so far and .* in the job, and cannot change: "
    with pytest.raises(BadInput, match=said) as caught:
        changes(asked, changed)
    assert rule.reason in str(caught.value)


def test_other_training_prompts_are_refused_wherever_they_come_from(asked: RunFile) -> None:
    with pytest.raises(BadInput, match="the training prompts are not those of the run so far"):
        changes(asked, asked.model_copy(update={"prompts": "others"}))


@pytest.mark.parametrize(("key", "kind"), RULED)
def test_what_is_under_way_is_dropped_where_it_was_drawn_otherwise(
    key: str, kind: Any, asked: RunFile, plan: Plan
) -> None:
    rule = rule_of(key)
    assert rule is not None
    is_same = sampling_digests(plan, with_another(asked.job, kind, key)) == sampling_digests(plan, asked.job)
    assert is_same == (rule.effect is not Effect.RESAMPLE)
