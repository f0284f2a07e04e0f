"""The algorithm of a configuration, and its settings as fields of a job.

A trainer names an advantage estimator; a job names an algorithm. The readers of all trainers share this mapping.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from meshwright.planner.imports.given_keys import TrainerConfig
from meshwright.planner.imports.said import FieldValue, ParsedConfig, ParsedField
from meshwright.planner.plan.job import DEFAULT_SETTINGS, SETTINGS_KEYS
from meshwright.profiles.algorithms import GROUP_ALGORITHMS, Algorithm, graph_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import StageGraph


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
"""The mean that a loss takes, by verl's names, which other trainers adopted."""


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
        """Sentences on what no key gives."""
        if self.function == USER_FUNCTION:
            yield f"{self.keys[0]}: the reward function is {USER_FUNCTION} in the job, which is yours to write."
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
    and inside the reward (None where it has none), and the reward function where no reward model scores."""

    config: TrainerConfig
    key: str
    estimator: Estimator
    has_ref: bool
    kl_in_loss: str | None = None
    kl_in_reward: str | None = None
    reward: FunctionReward | None = None

    @property
    def algorithm(self) -> Algorithm:
        return self.estimator.algorithm

    @property
    def graph(self) -> StageGraph:
        """The stages of the job."""
        has_function = self.reward is not None
        return graph_of(self.algorithm, has_ref=self.has_ref, has_reward=not has_function, has_environment=has_function)

    def stages(self, *names: str) -> tuple[str, ...]:
        """The named stages that the job has."""
        return tuple(name for name in names if name in self.graph.by_name)

    def group(self, samples: int, *keys: str) -> Iterator[ParsedField]:
        """The algorithm, the samples of a prompt and the reward. Raises BadInput for an algorithm that compares the
        samples of a prompt and has only one."""
        if self.algorithm in GROUP_ALGORITHMS and samples == 1:
            raise BadInput(
                f"{keys[0]}=1: {self.algorithm} compares the samples of a prompt with each other; use 2 or more."
            )
        yield ParsedField("algorithm", self.algorithm, (self.key,))
        yield ParsedField("workload.group_size", samples, keys)
        if self.reward is not None:
            yield from self.reward.fields()

    def settings(self, keys: Mapping[str, str]) -> Iterator[ParsedField]:
        """The numeric settings of the algorithm, from a mapping of our names to the trainer's keys, and those that the
        estimator and the KL penalty imply."""
        settings_key = SETTINGS_KEYS[self.algorithm]
        fields = type(DEFAULT_SETTINGS[settings_key]).model_fields
        if kl_key := self._kl_key:
            keys = {**keys, "kl_coefficient": kl_key}
        elif self.algorithm == "ppo":
            yield ParsedField("ppo.kl_coefficient", 0.0, (self.key,))
        for name, key in keys.items():
            if name in fields and self.config.value(key) is not None:
                yield ParsedField(f"{settings_key}.{name}", self.config.number(key), (key,))
        for name, value in self.estimator.settings.items():
            yield ParsedField(f"{settings_key}.{name}", value, (self.key,))

    def setting(self, name: str, value: FieldValue, key: str) -> Iterator[ParsedField]:
        """One setting, if the algorithm has it."""
        settings_key = SETTINGS_KEYS[self.algorithm]
        if name in type(DEFAULT_SETTINGS[settings_key]).model_fields:
            yield ParsedField(f"{settings_key}.{name}", value, (key,))

    def sampling(self, *, top_p: str, top_k: str | None = None) -> Iterator[ParsedField]:
        """The top-p and top-k of sampling; a trainer's -1 and an absent value mean all tokens."""
        if self.config.value(top_p) is not None:
            yield from self.setting("top_p", self.config.number(top_p), top_p)
        if top_k is not None and self.config.value(top_k) is not None:
            yield from self.setting("top_k", max(0, self.config.integer(top_k)), top_k)

    def warmup(self, role: str, key: str) -> Iterator[ParsedField]:
        """The number of steps over which the learning rate of a role warms up."""
        if f"{role}_schedule" not in type(DEFAULT_SETTINGS[SETTINGS_KEYS[self.algorithm]]).model_fields:
            return
        if self.config.value(key) is not None and self.config.integer(key) > 0:
            yield ParsedField(
                f"{SETTINGS_KEYS[self.algorithm]}.{role}_schedule.warmup_steps", self.config.integer(key), (key,)
            )

    def overlong(self, length: str, penalty: str) -> Iterator[ParsedField]:
        """The penalty that grows over the last tokens of the longest response."""
        if self.config.value(length):
            yield from self.setting("overlong_tokens", self.config.integer(length), length)
            if self.config.value(penalty) is not None:
                yield from self.setting("overlong_penalty", self.config.number(penalty), penalty)

    def adapter(self, rank: str, alpha: str) -> Iterator[ParsedField]:
        """The rank and the alpha of the actor's LoRA adapter, where it has one."""
        if self.config.value(rank):
            yield ParsedField("adapter.rank", self.config.integer(rank), (rank,))
            value = self.config.value(alpha)
            yield ParsedField("adapter.alpha", float(value) if value else self.config.integer(rank), (alpha,))

    def parsed(
        self,
        trainer: str,
        fields: Iterable[ParsedField],
        *,
        steps_ahead: int,
        notes: Iterable[str],
        unused: Iterable[str] = (),
    ) -> ParsedConfig:
        """The configuration in our fields, with the keys that were not read; `idle` are patterns of keys that have no
        use beside others."""
        named, unread = self.config.split_unread(trainer, unused)
        return ParsedConfig(
            fields=tuple(fields),
            steps_ahead=steps_ahead,
            notes=(*notes, *self.config.unknown_key_notes(trainer, unread), *self.config.notes),
            unmodelled=named,
            ignored=unread,
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
            yield f"{other_key} is read as that of the {place}: there {self.algorithm} has its KL penalty here."

    @property
    def _kl_key(self) -> str | None:
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
        raise BadInput(f"{key}={name} is not an algorithm of a job; configure one of {', '.join(known)}.")
    is_alone = single is not None and known[name].algorithm in GROUP_ALGORITHMS and config.integer(single) == 1
    return REINFORCE_ESTIMATOR if is_alone else known[name]


def single_sample_notes(config: TrainerConfig, key: str, known: Mapping[str, Estimator], single: str) -> Iterator[str]:
    """A sentence where a prompt has a single sample, so that there is none to compare it with."""
    if estimator_of(config, key, known, single=single) is not known[config.value(key)]:
        yield (
            f"{single}=1 with {key}={config.value(key)}: a single sample of a prompt is compared with no other, its "
            "advantage is its score, and it is read as reinforce++."
        )
