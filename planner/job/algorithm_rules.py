"""Rules of an algorithm for the rest of a job: which models it needs, and how many samples of each prompt."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, get_args

from meshwright.planner.job.algorithm_settings import Distill, LearningSettings, RewardedSettings
from meshwright.planner.job.custom_graph import OwnGraph, is_same_graph
from meshwright.profiles.algorithms import GROUP_ALGORITHMS, Algorithm, OldLogprobs, graph_of, with_sampling_mask
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.stages import ENVIRONMENT, TEACHERS, Role, StageGraph
from meshwright.profiles.workload import Workload

AnyAlgorithm: TypeAlias = Algorithm | OwnGraph
"""The name of a preset, or the job's own graph."""


def graph_for(
    algorithm: AnyAlgorithm,
    roles: Collection[Role],
    workload: Workload,
    *,
    has_environment: bool = False,
    ref_is_base: bool = False,
    old_logprobs: OldLogprobs = "recompute",
    teacher_top_k: int | None = None,
) -> StageGraph:
    """The stage graph of a job that has models of these roles."""
    if isinstance(algorithm, OwnGraph):
        return replace(algorithm.graph(ref_is_base=ref_is_base), selects_samples=workload.selects_samples)
    graph = graph_of(
        algorithm,
        has_ref=Role.REF in roles,
        has_reward=Role.REWARD in roles or not (has_environment or algorithm == "distill"),
        has_environment=has_environment,
        has_turns=workload.turns is not None,
        ref_is_base=ref_is_base,
        num_teachers=max(1, sum(role in TEACHERS for role in roles)),
        has_waves=workload.dynamic_sampling is not None,
        has_filter=workload.best_of is not None,
        old_logprobs=old_logprobs,
        teacher_top_k=teacher_top_k,
    )
    graph = with_sampling_mask(graph) if workload.kept_tokens else graph
    return replace(graph, selects_samples=True) if workload.selects_samples else graph


def presets_with_graph(
    own: OwnGraph, roles: Collection[Role], workload: Workload, *, has_environment: bool = False
) -> tuple[Algorithm, ...]:
    """The presets whose stage graph equals the job's own graph."""
    own_graph = own.graph()
    presets: tuple[Algorithm, ...] = get_args(Algorithm)
    return tuple(
        preset
        for preset in presets
        if is_same_graph(own_graph, graph_for(preset, roles, workload, has_environment=has_environment))
    )


def require_roles(
    algorithm: AnyAlgorithm, roles: Collection[Role], workload: Workload, *, has_environment: bool = False
) -> None:
    """Raises ValueError for the first broken rule about the models of an algorithm. A job whose rewards run on hosts
    needs no reward model."""
    for sentence in _violations(algorithm, roles, workload, has_environment):
        raise ValueError(sentence)


def require_settings_of_graph(allowed_keys: Collection[str], key: str) -> None:
    """Raises ValueError if a job with its own graph gives settings under a key other than `allowed_keys`, the keys of
    presets with the same graph. A graph that no preset has may be trained with the settings of any."""
    if allowed_keys and key not in allowed_keys:
        raise ValueError(
            f"{key}: algorithm is the job's own graph, and its settings are under {' or '.join(allowed_keys)}; remove "
            f"{key}, or name the loss of a training stage"
        )


def require_reference(settings_key: str, settings: LearningSettings, roles: Collection[Role]) -> None:
    """Raises ValueError for a KL coefficient that the job sets without naming a reference model.

    The default coefficient needs no reference: without one it is 0.
    """
    if Role.REF in roles or "kl_coefficient" not in settings.model_fields_set:
        return
    coefficient = getattr(settings, "kl_coefficient", 0.0)
    if coefficient:
        raise ValueError(
            f"{settings_key}.kl_coefficient={coefficient:g} penalises the distance from a reference, and models.ref "
            "names none; name one, or use 0"
        )


def require_limited_sets(kept_tokens: int, settings: LearningSettings, settings_key: str) -> None:
    """Raises ValueError if the sets of a sampling mask, of the tokens that the filters leave at a position, may have
    more than `kept_tokens` tokens."""
    if not kept_tokens or 0 < settings.top_k <= kept_tokens:
        return
    raise ValueError(
        f"workload.kept_tokens={kept_tokens}: {settings_key}.top_k={settings.top_k} leaves "
        f"{'more tokens' if settings.top_k else 'all tokens, and top_p any number of them'}; use a top_k of 1 to "
        f"{kept_tokens}, or raise kept_tokens"
    )


def require_teacher_weights(weights: Sequence[float], roles: Iterable[Role]) -> None:
    """Raises ValueError unless there is a weight for every teacher among these roles, or for none."""
    teachers = [role for role in roles if role in TEACHERS]
    if weights and len(weights) != len(teachers):
        raise ValueError(
            f"distill.teacher_weights has {len(weights)} weights and models has {len(teachers)} teachers "
            f"({', '.join(teachers)}); give one weight to each, or none at all"
        )


def require_distillation(
    settings: Distill, algorithm: AnyAlgorithm, roles: Collection[Role], *, has_environment: bool
) -> None:
    """Raises ValueError for the first setting of a distillation that has no effect in its job: one of rewards without
    any, or whole distributions in a graph of the job's own."""
    require_teacher_weights(settings.teacher_weights, roles)
    if settings.teacher_top_k and isinstance(algorithm, OwnGraph):
        raise ValueError(
            f"distill.teacher_top_k={settings.teacher_top_k}: an inference of the job's own graph writes one field, "
            "and a teacher's distributions are two more; name algorithm: distill, or remove it"
        )
    if has_environment or Role.REWARD in roles:
        return
    default = Distill()
    for name in (*RewardedSettings.model_fields, "distillation_weight", "normalise_by_std"):
        value = getattr(settings, name)
        if name not in LearningSettings.model_fields and value != getattr(default, name):
            raise ValueError(
                f"distill.{name}={value} concerns rewards, and the job has none; remove it, or add rewards or a reward "
                "model"
            )


def teacher_top_k_violations(
    top_k: int | None, algorithm: AnyAlgorithm, vocab_size: int, kept_tokens: int
) -> Iterator[str]:
    """One sentence for each reason why teachers cannot report so many tokens of each prediction."""
    if top_k and algorithm != "distill":
        yield f"teacher_top_k={top_k}: only algorithm=distill has teachers that report it; remove it."
    if top_k and top_k > vocab_size:
        yield f"teacher_top_k={top_k} is more than the {vocab_size} tokens of the vocabulary; use {vocab_size} or less."
    if top_k and kept_tokens:
        yield (
            f"teacher_top_k={top_k} compares distributions over the whole vocabulary, and workload.kept_tokens="
            f"{kept_tokens} makes them those over the sampling mask; remove one of the two."
        )


def require_trained_adapters(roles: Iterable[Role], trained: Collection[Role]) -> None:
    """Raises ValueError if `roles`, whose models have adapters, contain another than the actor and the critic, or one
    that the job does not train."""
    for role in roles:
        if role not in (Role.ACTOR, Role.CRITIC):
            raise ValueError(f"models.{role}.adapter: only actor and critic are trained by adapters; remove it")
        if role not in trained:
            raise ValueError(f"models.{role}.adapter: no stage trains the {role}; remove it, or add one that does")


def require_ref_is_base(models: Mapping[str, ModelSpec], trained: Collection[Role], *, ref_is_base: bool) -> None:
    """Raises ValueError if `ref_is_base` is set and the reference is not the actor without its adapter, or if a model
    has an adapter that is not trained (`trained` are the roles that are)."""
    require_trained_adapters([Role(name) for name, spec in models.items() if spec.adapter], trained)
    actor, ref = models[Role.ACTOR], models.get(Role.REF)
    if ref_is_base and (actor.adapter is None or ref is None or ref != replace(actor, adapter=None, name=ref.name)):
        raise ValueError(
            "ref_is_base=true, and the reference is not the actor without an adapter; set it to false, or give the "
            "actor an adapter and the reference its shape"
        )


def _violations(
    algorithm: AnyAlgorithm, roles: Collection[Role], workload: Workload, has_environment: bool
) -> Iterator[str]:
    described = str(algorithm) if isinstance(algorithm, OwnGraph) else f"algorithm={algorithm}"
    graph = graph_for(algorithm, roles, workload, has_environment=has_environment)
    for role in Role:
        if role in graph.roles and role not in roles:
            yield f"missing key 'models.{role}': {described} has a stage of that role; add it"
        if role in roles and role not in graph.roles:
            yield f"models.{role}: {described} has no stage of that role; remove it"
    if has_environment and not graph.host_stages:
        yield f"rewards: {described} has no stage of the environment; add {ENVIRONMENT}, or remove them"
    if graph.host_stages and not has_environment:
        yield (
            f"missing key 'rewards': {described} has the stage {ENVIRONMENT}; add what it scores by, or remove the "
            "stage"
        )
    if workload.dynamic_sampling:
        yield from _wave_violations(algorithm)
    is_rewarded = has_environment or Role.REWARD in roles
    yield from _filter_violations(algorithm, described, workload, is_rewarded=is_rewarded)
    yield from _mask_violations(algorithm, described, workload)
    if workload.group_size == 1:
        yield from _single_sample_violations(algorithm, is_rewarded=is_rewarded)


def _single_sample_violations(algorithm: AnyAlgorithm, *, is_rewarded: bool) -> Iterator[str]:
    """Rules about algorithms that compare the samples of a prompt, of which there is only one."""
    if algorithm in GROUP_ALGORITHMS:
        yield (
            f"workload.group_size=1: algorithm={algorithm} compares the samples of a prompt with each other; use 2 or "
            "more"
        )
    if algorithm == "distill" and is_rewarded:
        yield (
            "workload.group_size=1: algorithm=distill compares the rewards of a prompt's samples with each other; use "
            "2 or more, or remove the rewards"
        )


def _mask_violations(algorithm: AnyAlgorithm, described: str, workload: Workload) -> Iterator[str]:
    """The rule about a sampling mask: only stages of presets read it."""
    if workload.kept_tokens and isinstance(algorithm, OwnGraph):
        yield (
            f"workload.kept_tokens={workload.kept_tokens}: {described} has stages that do not read the sets of kept "
            "tokens; name a preset, or use 0"
        )


def _wave_violations(algorithm: AnyAlgorithm) -> Iterator[str]:
    """Rules about dynamic sampling: which algorithms drop groups of equal rewards, and for an own graph what a wave is
    selected by, and what waits for the selection."""
    if algorithm == "distill":
        yield (
            "workload.dynamic_sampling drops groups whose samples have the same reward, and algorithm=distill learns "
            "from the tokens of these too; remove it"
        )
    elif not isinstance(algorithm, OwnGraph) and algorithm not in GROUP_ALGORITHMS:
        yield (
            f"workload.dynamic_sampling: algorithm={algorithm} does not compare the samples of a group; use "
            f"{' or '.join(GROUP_ALGORITHMS)}, or remove it"
        )
    if isinstance(algorithm, OwnGraph):
        yield from _unselected_stages(algorithm)


def _unselected_stages(algorithm: OwnGraph) -> Iterator[str]:
    """One sentence for each stage of an own graph that does not wait for the groups that it works on."""
    trained = algorithm.trained
    scores = [
        (stage.name, field)
        for stage in algorithm.stages
        if stage.kind == "inference" and stage.role is Role.REWARD and stage.role not in trained
        for field in stage.writes
    ]
    scorers, kept = {name for name, _ in scores}, algorithm.filter.writes if algorithm.filter else ()
    if not scores and not any(stage.kind == "environment" for stage in algorithm.stages):
        yield (
            "workload.dynamic_sampling: no stage of the job's own graph scores the samples; add an inference of an "
            "untrained reward model, or rewards on hosts"
        )
    for stage in algorithm.stages:
        for _, field in scores:
            waits = field in stage.reads or not set(kept).isdisjoint(stage.reads)
            if stage.kind == "inference" and stage.name not in scorers and not waits:
                yield (
                    f"workload.dynamic_sampling: {stage.name} does not read {field}, and it works on the groups that "
                    f"are selected by it; add {field} to its reads"
                )


def _filter_violations(
    algorithm: AnyAlgorithm, described: str, workload: Workload, *, is_rewarded: bool
) -> Iterator[str]:
    """Rules about best-of-n: a graph with a filter needs the number of samples of each prompt, and the other way
    round."""
    filter_stage = algorithm.filter if isinstance(algorithm, OwnGraph) else None
    if workload.best_of and algorithm == "distill" and not is_rewarded:
        yield "workload.best_of: no rewards say which sample is best; add rewards, or remove it"
    if workload.best_of and isinstance(algorithm, OwnGraph) and not filter_stage:
        yield (
            f"workload.best_of: {described} has no stage that keeps the best samples; add one of kind=filter, or "
            "remove workload.best_of"
        )
    if filter_stage and not workload.best_of:
        yield (
            f"missing key 'workload.best_of': {filter_stage.name} keeps some samples of a prompt; say how many are "
            "sampled, or remove the stage"
        )
