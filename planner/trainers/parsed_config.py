"""A trainer's configuration as fields of a job and as pins, each with the trainer's keys that it comes from.

The readers of all trainers share it: the algorithm of an advantage estimator, its settings, the layout that a set of
degrees gives, and the placement of pools on nodes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from meshwright.planner.job.job import DEFAULT_SETTINGS, SETTINGS_KEYS
from meshwright.planner.trainers.config_keys import TrainerConfig
from meshwright.profiles.algorithms import GROUP_ALGORITHMS, Algorithm, OldLogprobs, graph_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.stages import StageGraph
from meshwright.profiles.untrusted_text import limited

FieldValue: TypeAlias = str | int | float | bool
"""The value of a field or a pin."""

MEMORY_SHARE = "engine.memory_share"
"""The share of a device's memory that generation's weights and KV cache may take, as a configuration gives it."""

_USUAL_RANKS = 8
"""GPUs of a node where a configuration uses only part of one; all of NVIDIA's HGX and DGX nodes with SXM have 8."""


@dataclass(frozen=True)
class ParsedField:
    """A field of the job (`workload.batch_size`) or a pin (`actor_train.layout`), its value, and the keys it comes
    from."""

    what: str
    value: FieldValue
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ParsedConfig:
    """A configuration as fields of a job and pins, with sentences on what they cannot express.

    `steps_ahead` says how many steps generation works ahead. `unmodelled` are keys that may change a step and are not
    read, with the reason; `ignored` are keys that a plan does not depend on; `read_keys` is every key that was read,
    whether the configuration gives it or has its default.
    """

    fields: tuple[ParsedField, ...]
    steps_ahead: int
    notes: tuple[str, ...] = ()
    unmodelled: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    read_keys: frozenset[str] = frozenset()

    @property
    def by_name(self) -> Mapping[str, FieldValue]:
        """The values by the name of their field or pin."""
        return {field.what: field.value for field in self.fields}

    @property
    def algorithm(self) -> Algorithm:
        return cast(Algorithm, self.by_name.get("algorithm", "ppo"))

    def with_keys(self, sentence: str) -> str:
        """Return a sentence, and after it the trainer's keys of each field that it names.

        A field of the workload may be named without `workload.`: batch_size, or response.max.
        """
        clauses = (
            f"{field.what} comes from {' and '.join(field.keys)}"
            for field in self.fields
            if field.keys and _name_pattern(field.what).search(sentence)
        )
        return "; ".join((sentence.removesuffix("."), *clauses)) + "."


def _name_pattern(field_name: str) -> re.Pattern[str]:
    """A pattern for the name of a field in a sentence; lengths are named with their maximum."""
    group, _, name = field_name.partition(".")
    if group != "workload":
        return re.compile(rf"(?<![\w.]){re.escape(field_name)}(?!\w)")
    return re.compile(rf"(?<!\w){name}{r'[.]max' if name in ('prompt', 'response') else ''}(?!\w)")


def layout_of(
    degrees: Mapping[str, int], num_ranks: int, *, keys: Mapping[str, str] | None = None, sp: bool = False
) -> Layout:
    """The layout of `num_ranks` ranks whose replicas have these degrees; etp=0 means etp=tp.

    Experts are sharded over whole replicas only: the given ep becomes gcd(ep, dp) or, where etp is 1 and tp divides
    ep, tp x gcd(ep / tp, dp) with whole experts on each rank. With ep > 1 there is no context parallelism, so its ranks
    become replicas. Raises BadInput where the degrees do not divide the ranks; it names them by `keys`, the trainer's
    key of each axis.
    """
    if num_ranks < 1:
        name = next(iter((keys or {}).values()), "tp")
        raise BadInput(f"{name}: its pool has {num_ranks} ranks; give its nodes and its GPUs a node as 1 or more.")
    ranks_per_replica = degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("cp", 1)
    if ranks_per_replica < 1 or num_ranks % ranks_per_replica:
        names = {axis: (keys or {}).get(axis, axis) for axis in ("tp", "pp", "cp") if degrees.get(axis, 1) != 1}
        raise BadInput(
            f"{' x '.join(f'{name}={degrees[axis]}' for axis, name in names.items())} does not divide the {num_ranks} "
            "ranks of its pool; use degrees whose product does."
        )
    tp, ep = degrees.get("tp", 1), degrees.get("ep", 1)
    cp = 1 if ep > 1 else degrees.get("cp", 1)
    dp = num_ranks // (tp * degrees.get("pp", 1) * cp)
    folded_tp = tp if degrees.get("etp") == 1 and ep % tp == 0 else 1
    experts = {"ep": folded_tp * math.gcd(ep // folded_tp, dp), "etp": tp // folded_tp}
    return Layout(**{**degrees, **experts, "cp": cp}, dp=dp, sp=sp and tp > 1)


def layout_notes(key: str, degrees: Mapping[str, int], layout: Layout) -> Iterator[str]:
    """Sentences on expert and context parallelism that `layout_of` changed: a smaller ep, experts sharded by tp that
    the configuration keeps whole, and context parallelism of a model with experts."""
    ep, cp = degrees.get("ep", 1), degrees.get("cp", 1)
    if layout.ep != ep:
        yield f"{key}={ep} is read as {layout.ep}: here experts are divided over replicas, and there are {layout.dp}."
    elif degrees.get("etp", 0) == 1 < ep and layout.etp > 1:
        yield (
            f"{key}={ep} is read with experts sharded over tp={layout.tp}: whole experts (etp=1) need an ep that is a "
            "multiple of tp."
        )
    if layout.cp != cp:
        yield (
            f"{key}={ep} with context parallelism of {cp}: it is not modelled for mixture-of-experts models, and is "
            f"read as {cp} times as many replicas, each with the token budget of one rank."
        )


def consecutive_pools(sizes: Iterable[tuple[str, int]]) -> Iterator[tuple[str, str]]:
    """Place pools one after the other, as names and pin values; largest first if one would cross nodes otherwise."""
    ordered = list(sizes)
    if _crosses_nodes([size for _, size in ordered]):
        ordered.sort(key=lambda pool: -pool[1])
    first = 0
    for name, size in ordered:
        yield name, f"{first}:{size}"
        first += size


def _crosses_nodes(sizes: Iterable[int]) -> bool:
    """True if one of several consecutive pools begins or ends inside a node of 8 ranks and spans more than one."""
    first = 0
    for size in sizes:
        ranks_left = _USUAL_RANKS - first % _USUAL_RANKS
        if size > ranks_left and (first % _USUAL_RANKS or size % _USUAL_RANKS):
            return True
        first += size
    return False


def nodes_of_ranks(number: int) -> tuple[int, int]:
    """Nodes and ranks per node of a pool that a configuration gives as a number of ranks alone."""
    is_whole_nodes = number % _USUAL_RANKS == 0
    return (number // _USUAL_RANKS, _USUAL_RANKS) if is_whole_nodes else (1, number)


def cluster_of(pools: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Nodes and ranks per node of a cluster that holds disjoint pools, each given as (nodes, ranks per node).

    Pools of one node each share a node if they fit, or fill nodes of 8. Raises BadInput for pools that are neither
    whole nodes nor parts of one.
    """
    per_node = {ranks for _, ranks in pools.values()}
    if all(nodes == 1 for nodes, _ in pools.values()):
        total = sum(ranks for _, ranks in pools.values())
        if total <= _USUAL_RANKS or len(pools) == 1:
            return 1, total
        if max(per_node) <= _USUAL_RANKS and total % _USUAL_RANKS == 0:
            return total // _USUAL_RANKS, _USUAL_RANKS
    if len(per_node) == 1:
        return sum(nodes for nodes, _ in pools.values()), per_node.pop()
    if max(per_node) == _USUAL_RANKS and all(ranks * nodes % _USUAL_RANKS == 0 for nodes, ranks in pools.values()):
        return sum(nodes * ranks for nodes, ranks in pools.values()) // _USUAL_RANKS, _USUAL_RANKS
    listed = ", ".join(f"{name} {nodes} x {ranks}" for name, (nodes, ranks) in pools.items())
    raise BadInput(
        f"pools of several nodes with different numbers of ranks ({listed}) are not planned; use whole nodes."
    )


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One of a trainer's advantage estimators, as an algorithm of a job and the settings that its name implies."""

    algorithm: Algorithm
    settings: Mapping[str, FieldValue] = field(default_factory=dict)


PPO_ESTIMATOR = Estimator(algorithm="ppo")
GRPO_ESTIMATOR = Estimator(algorithm="grpo")
RLOO_ESTIMATOR = Estimator(algorithm="rloo")
REINFORCE_ESTIMATOR = Estimator(algorithm="reinforce++")
REINFORCE_BASELINE_ESTIMATOR = Estimator(algorithm="reinforce++", settings={"group_baseline": True})

LOSS_MEANS: Mapping[object, str] = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum-norm": "constant",
}
"""How a loss is averaged, by verl's names, which other trainers adopted."""


@dataclass(frozen=True)
class FunctionReward:
    """A reward function in place of a reward model: a built-in one, or `module:function` of a file that the user
    writes, and the keys it comes from."""

    function: str
    keys: tuple[str, ...]

    def fields(self) -> Iterator[ParsedField]:
        """The fields of a job's reward."""
        yield ParsedField("reward.name", "verifier", self.keys)
        yield ParsedField("reward.function", self.function, self.keys)

    def notes(self) -> Iterator[str]:
        """Sentences on what the configuration does not specify."""
        if self.function == USER_FUNCTION:
            yield f"{self.keys[0]}: the job calls {USER_FUNCTION} as its reward function; write it."
        yield (
            "no key says how long a call of the reward function takes: 0.01 s is ASSUMED; measure it, and give "
            "rewards.latency_seconds in the job."
        )


USER_FUNCTION = "reward:score"
"""The name under which a job refers to the reward function of the trainer's user."""

MATHS = "maths_answer"


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The algorithm that a configuration trains with: the estimator and its key, the keys of the KL penalty in the loss
    and inside the reward (None where it has none), the reward function where no reward model scores, and the source of
    the log-probabilities before the updates."""

    config: TrainerConfig
    key: str
    estimator: Estimator
    has_ref: bool
    kl_in_loss: str | None = None
    kl_in_reward: str | None = None
    reward: FunctionReward | None = None
    old_logprobs: OldLogprobs = "recompute"

    @property
    def algorithm(self) -> Algorithm:
        return self.estimator.algorithm

    @property
    def graph(self) -> StageGraph:
        """The stages of the job."""
        has_function = self.reward is not None
        return graph_of(
            self.algorithm,
            has_ref=self.has_ref,
            has_reward=not has_function,
            has_environment=has_function,
            old_logprobs=self.old_logprobs,
        )

    def stages(self, *names: str) -> tuple[str, ...]:
        """The named stages that the job has."""
        return tuple(name for name in names if name in self.graph.by_name)

    def group(self, samples: int, key: str) -> Iterator[ParsedField]:
        """The samples per prompt. Raises BadInput for 1 if the algorithm compares the samples of a prompt."""
        if self.algorithm in GROUP_ALGORITHMS and samples == 1:
            raise BadInput(
                f"{key}=1: {self.algorithm} compares the samples of a prompt with each other; use 2 or more."
            )
        yield ParsedField("workload.group_size", samples, (key,))

    def algorithm_fields(self) -> Iterator[ParsedField]:
        """The algorithm, and the settings that the estimator implies; PPO without a KL penalty has a coefficient of
        0."""
        yield ParsedField("algorithm", self.algorithm, (self.key,))
        if self.algorithm == "ppo" and self.kl_key is None:
            yield ParsedField("ppo.kl_coefficient", 0.0, (self.key,))
        for name, value in self.estimator.settings.items():
            yield ParsedField(f"{SETTINGS_KEYS[self.algorithm]}.{name}", value, (self.key,))

    def number_setting(self, name: str, key: str) -> Iterator[ParsedField]:
        """A numeric setting, if the algorithm has it and the key a value."""
        settings_key = SETTINGS_KEYS[self.algorithm]
        if name in type(DEFAULT_SETTINGS[settings_key]).model_fields and self.config.value(key) is not None:
            yield ParsedField(f"{settings_key}.{name}", self.config.number(key), (key,))

    def setting(self, name: str, value: FieldValue, key: str) -> Iterator[ParsedField]:
        """One setting, if the algorithm has it."""
        settings_key = SETTINGS_KEYS[self.algorithm]
        if name in type(DEFAULT_SETTINGS[settings_key]).model_fields:
            yield ParsedField(f"{settings_key}.{name}", value, (key,))

    def parsed(
        self,
        trainer: str,
        fields: Iterable[ParsedField],
        *,
        steps_ahead: int,
        notes: Iterable[str],
        unused: Iterable[str] = (),
    ) -> ParsedConfig:
        """The configuration as fields of a job and pins, with the keys that were not read; `unused` are patterns of
        keys that have no effect because of other keys."""
        unmodelled, ignored = self.config.split_unread(trainer, unused)
        return ParsedConfig(
            fields=tuple(fields),
            steps_ahead=steps_ahead,
            notes=(*notes, *self.config.notes),
            unmodelled=unmodelled,
            ignored=ignored,
            read_keys=frozenset(self.config.read_keys),
        )

    def notes(self) -> Iterator[str]:
        """Sentences on settings that are read differently from how the configuration gives them."""
        if self.reward is not None:
            yield from self.reward.notes()
        place = "loss" if self.algorithm == "grpo" else "reward"
        kept_key = self.kl_in_loss if place == "loss" else self.kl_in_reward
        other_key = self.kl_in_reward if place == "loss" else self.kl_in_loss
        if other_key and kept_key:
            yield f"{other_key} is left out: {self.algorithm} has its KL penalty in the {place} here."
        elif other_key and self.algorithm != "ppo":
            yield (
                f"{other_key} is read as the coefficient of a KL penalty in the {place}, where {self.algorithm} has it "
                "here."
            )

    @property
    def kl_key(self) -> str | None:
        """The key of the KL penalty's coefficient: that of the place where the algorithm has it, else the other."""
        in_loss, in_reward = self.kl_in_loss, self.kl_in_reward
        return (in_loss or in_reward) if self.algorithm == "grpo" else (in_reward or in_loss)


def estimator_of(
    config: TrainerConfig, key: str, known: Mapping[str, Estimator], *, single: str | None = None
) -> Estimator:
    """The estimator that a configuration names under `key`. Raises BadInput for one that no job has.

    `single` is the key of the number of samples of a prompt, for a trainer that allows a single sample even where an
    algorithm compares the samples of a prompt. The advantage of a single sample is its score, as in REINFORCE.
    """
    name = config.value(key)
    if name not in known:
        raise BadInput(f"{key}={limited(str(name))} is not an algorithm of a job; configure one of {', '.join(known)}.")
    is_alone = single is not None and known[name].algorithm in GROUP_ALGORITHMS and config.integer(single) == 1
    return REINFORCE_ESTIMATOR if is_alone else known[name]


def single_sample_notes(config: TrainerConfig, key: str, known: Mapping[str, Estimator], single: str) -> Iterator[str]:
    """A sentence where a prompt has a single sample, so that there is none to compare it with."""
    if estimator_of(config, key, known, single=single) is not known[config.value(key)]:
        yield (
            f"{single}=1 with {key}={config.value(key)}: a single sample of a prompt is compared with no other, its "
            "advantage is its score, and it is read as reinforce++."
        )
