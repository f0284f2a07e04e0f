"""The algorithm of a configuration, and its settings as fields of a job.

A trainer names an advantage estimator; a job names an algorithm. The readers of all trainers share this mapping.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from meshwright.planner.imports.given_keys import GivenKeys
from meshwright.planner.imports.said import Configured, Said, Word
from meshwright.planner.plan.job import DEFAULT_SETTINGS, SETTINGS_KEYS
from meshwright.profiles.algorithms import COMPARES_GROUPS, Algorithm, graph_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import StageGraph


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One of a trainer's advantage estimators, as an algorithm of a job and the settings that its name implies."""

    algorithm: Algorithm
    settings: Mapping[str, Word] = field(default_factory=dict)


PPO = Estimator(algorithm="ppo")
GRPO = Estimator(algorithm="grpo")
RLOO = Estimator(algorithm="rloo")
REINFORCE = Estimator(algorithm="reinforce++")
REINFORCE_BASELINE = Estimator(algorithm="reinforce++", settings={"group_baseline": True})

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

    def said(self) -> Iterator[Said]:
        """The fields of a job's reward."""
        yield Said("reward.name", "verifier", self.keys)
        yield Said("reward.function", self.function, self.keys)

    def notes(self) -> Iterator[str]:
        """Sentences on what no key gives."""
        if self.function == YOUR_FUNCTION:
            yield f"{self.keys[0]}: the reward function is {YOUR_FUNCTION} in the job, which is yours to write."
        yield (
            "no key says how long a call of the reward function takes: 0.01 s is ASSUMED; measure it, and give "
            "rewards.latency_seconds in the job."
        )


YOUR_FUNCTION = "reward:score"
"""The name under which a job refers to the reward function of the trainer's user."""

MATHS = "maths_answer"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The algorithm that a configuration trains with: the estimator and its key, the keys of the KL penalty in the loss
    and inside the reward (None where it has none), and the reward function where no reward model scores."""

    given: GivenKeys
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

    def group(self, samples: int, *keys: str) -> Iterator[Said]:
        """The algorithm, the samples of a prompt and the reward. Raises BadInput for an algorithm that compares the
        samples of a prompt and has only one."""
        if self.algorithm in COMPARES_GROUPS and samples == 1:
            raise BadInput(
                f"{keys[0]}=1: {self.algorithm} compares the samples of a prompt with each other; use 2 or more."
            )
        yield Said("algorithm", self.algorithm, (self.key,))
        yield Said("workload.group_size", samples, keys)
        if self.reward is not None:
            yield from self.reward.said()

    def settings(self, keys: Mapping[str, str]) -> Iterator[Said]:
        """The numeric settings of the algorithm, from a mapping of our names to the trainer's keys, and those that the
        estimator and the KL penalty imply."""
        settings_key = SETTINGS_KEYS[self.algorithm]
        fields = type(DEFAULT_SETTINGS[settings_key]).model_fields
        if kl_key := self._kl_key:
            keys = {**keys, "kl_coefficient": kl_key}
        elif self.algorithm == "ppo":
            yield Said("ppo.kl_coefficient", 0.0, (self.key,))
        for name, key in keys.items():
            if name in fields and self.given.value(key) is not None:
                yield Said(f"{settings_key}.{name}", self.given.number(key), (key,))
        for name, value in self.estimator.settings.items():
            yield Said(f"{settings_key}.{name}", value, (self.key,))

    def setting(self, name: str, value: Word, key: str) -> Iterator[Said]:
        """One setting, if the algorithm has it."""
        settings_key = SETTINGS_KEYS[self.algorithm]
        if name in type(DEFAULT_SETTINGS[settings_key]).model_fields:
            yield Said(f"{settings_key}.{name}", value, (key,))

    def sampling(self, *, top_p: str, top_k: str | None = None) -> Iterator[Said]:
        """The top-p and top-k of sampling; a trainer's -1 and an absent value mean all tokens."""
        if self.given.value(top_p) is not None:
            yield from self.setting("top_p", self.given.number(top_p), top_p)
        if top_k is not None and self.given.value(top_k) is not None:
            yield from self.setting("top_k", max(0, self.given.whole(top_k)), top_k)

    def warmup(self, role: str, key: str) -> Iterator[Said]:
        """The number of steps over which the learning rate of a role warms up."""
        if f"{role}_schedule" not in type(DEFAULT_SETTINGS[SETTINGS_KEYS[self.algorithm]]).model_fields:
            return
        if self.given.value(key) is not None and self.given.whole(key) > 0:
            yield Said(f"{SETTINGS_KEYS[self.algorithm]}.{role}_schedule.warmup_steps", self.given.whole(key), (key,))

    def overlong(self, length: str, penalty: str) -> Iterator[Said]:
        """The penalty that grows over the last tokens of the longest response."""
        if self.given.value(length):
            yield from self.setting("overlong_tokens", self.given.whole(length), length)
            if self.given.value(penalty) is not None:
                yield from self.setting("overlong_penalty", self.given.number(penalty), penalty)

    def adapter(self, rank: str, alpha: str) -> Iterator[Said]:
        """The rank and the alpha of the actor's LoRA adapter, where it has one."""
        if self.given.value(rank):
            yield Said("adapter.rank", self.given.whole(rank), (rank,))
            value = self.given.value(alpha)
            yield Said("adapter.alpha", float(value) if value else self.given.whole(rank), (alpha,))

    def configured(
        self, trainer: str, said: Iterable[Said], *, steps_ahead: int, notes: Iterable[str], idle: Iterable[str] = ()
    ) -> Configured:
        """The configuration in our fields, with the keys that were not read; `idle` are patterns of keys that have no
        use beside others."""
        named, unread = self.given.accounted(trainer, idle)
        return Configured(
            said=tuple(said),
            steps_ahead=steps_ahead,
            notes=(*notes, *self.given.strange(trainer, unread), *self.given.notes),
            named=named,
            unread=unread,
            asked=frozenset(self.given.asked),
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


def estimator_of(given: GivenKeys, key: str, known: Mapping[str, Estimator], *, single: str | None = None) -> Estimator:
    """The estimator that a configuration names under `key`. Raises BadInput for one that no job has.

    `single` is the key of the number of samples of a prompt, for a trainer that allows a single sample even where an
    algorithm compares the samples of a prompt. The advantage of a single sample is its score, as in REINFORCE.
    """
    name = given.value(key)
    if name not in known:
        raise BadInput(f"{key}={name} is not an algorithm of a job; configure one of {', '.join(known)}.")
    is_alone = single is not None and known[name].algorithm in COMPARES_GROUPS and given.whole(single) == 1
    return REINFORCE if is_alone else known[name]


def alone_notes(given: GivenKeys, key: str, known: Mapping[str, Estimator], single: str) -> Iterator[str]:
    """A sentence where a prompt has a single sample, so that there is none to compare it with."""
    if estimator_of(given, key, known, single=single) is not known[given.value(key)]:
        yield (
            f"{single}=1 with {key}={given.value(key)}: a single sample of a prompt is compared with no other, its "
            "advantage is its score, and it is read as reinforce++."
        )
