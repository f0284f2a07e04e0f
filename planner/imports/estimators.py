"""The algorithm of a configuration: ours for a trainer's estimator of advantages, and its settings by a job's keys."""

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
    """What one of a trainer's estimators is in a job: an algorithm, and settings of it that the name decides."""

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
"""What a loss is a mean over, by the names that verl has for it and others took over."""


@dataclass(frozen=True)
class FunctionReward:
    """The function that gives final scalar rewards in place of a reward model: one that is built in, or module:function
    of a file that is the user's to write; and the keys that say so."""

    function: str
    keys: tuple[str, ...]

    def said(self) -> Iterator[Said]:
        """The reward of a job."""
        yield Said("reward.name", "verifier", self.keys)
        yield Said("reward.function", self.function, self.keys)

    def notes(self) -> Iterator[str]:
        """The choices that no key states."""
        if self.function == YOUR_FUNCTION:
            yield f"{self.keys[0]}: the reward function is {YOUR_FUNCTION} in the job, which is yours to write."
        yield (
            "no key says how long a call of the reward function takes: 0.01 s is ASSUMED; measure it, and give "
            "rewards.latency_seconds in the job."
        )


YOUR_FUNCTION = "reward:score"
"""The name under which a job refers to the function of a trainer's user."""

MATHS = "maths_answer"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What a configuration trains with: the estimator under its key, and keys of the KL penalty where it has one, in
    the loss, inside the reward, or both. It has a reference where `has_ref`."""

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
        """The stages of its job."""
        pays = self.reward is not None
        return graph_of(self.algorithm, has_ref=self.has_ref, has_reward=not pays, has_environment=pays)

    def stages(self, *names: str) -> tuple[str, ...]:
        """Selects those of the named stages that its job has."""
        return tuple(name for name in names if name in self.graph.by_name)

    def group(self, samples: int, *keys: str) -> Iterator[Said]:
        """The algorithm and the samples of a prompt; raises BadInput where it has none to compare."""
        if self.algorithm in COMPARES_GROUPS and samples == 1:
            raise BadInput(
                f"{keys[0]}=1: {self.algorithm} compares the samples of a prompt with each other; use 2 or more."
            )
        yield Said("algorithm", self.algorithm, (self.key,))
        yield Said("workload.group_size", samples, keys)
        if self.reward is not None:
            yield from self.reward.said()

    def settings(self, keys: Mapping[str, str]) -> Iterator[Said]:
        """The settings that the algorithm has, of numbers under the trainer's keys by our names, and those that its
        estimator and its KL penalty decide."""
        own = SETTINGS_KEYS[self.algorithm]
        known = type(DEFAULT_SETTINGS[own]).model_fields
        if kl_key := self._kl_key:
            keys = {**keys, "kl_coefficient": kl_key}
        elif self.algorithm == "ppo":
            yield Said("ppo.kl_coefficient", 0.0, (self.key,))
        for name, key in keys.items():
            if name in known and self.given.value(key) is not None:
                yield Said(f"{own}.{name}", self.given.number(key), (key,))
        for name, value in self.estimator.settings.items():
            yield Said(f"{own}.{name}", value, (self.key,))

    def setting(self, name: str, value: Word, key: str) -> Iterator[Said]:
        """One more setting, if the algorithm has it."""
        own = SETTINGS_KEYS[self.algorithm]
        if name in type(DEFAULT_SETTINGS[own]).model_fields:
            yield Said(f"{own}.{name}", value, (key,))

    def sampling(self, *, top_p: str, top_k: str | None = None) -> Iterator[Said]:
        """top-k of the sampling; a trainer's -1 and an absent value mean all tokens."""
        if self.given.value(top_p) is not None:
            yield from self.setting("top_p", self.given.number(top_p), top_p)
        if top_k is not None and self.given.value(top_k) is not None:
            yield from self.setting("top_k", max(0, self.given.whole(top_k)), top_k)

    def warmup(self, role: str, key: str) -> Iterator[Said]:
        """Yields the number of steps over which the learning rate of a role rises."""
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
        """The rank and the alpha of the actor's adapter, where it has one."""
        if self.given.value(rank):
            yield Said("adapter.rank", self.given.whole(rank), (rank,))
            found = self.given.value(alpha)
            yield Said("adapter.alpha", float(found) if found else self.given.whole(rank), (alpha,))

    def configured(
        self, trainer: str, said: Iterable[Said], *, steps_ahead: int, notes: Iterable[str], idle: Iterable[str] = ()
    ) -> Configured:
        """All that the configuration says, with what is to be known of the keys that nobody has asked for; `idle` are
        patterns of those of no use beside others."""
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
        """What is read otherwise than it is said."""
        if self.reward is not None:
            yield from self.reward.notes()
        place = "loss" if self.algorithm == "grpo" else "reward"
        own = self.kl_in_loss if place == "loss" else self.kl_in_reward
        other = self.kl_in_reward if place == "loss" else self.kl_in_loss
        if other and own:
            yield f"{other} is left out: {self.algorithm} has its KL penalty in the {place} here."
        elif other and self.algorithm != "ppo":
            yield f"{other} is read as that of the {place}: there {self.algorithm} has its KL penalty here."

    @property
    def _kl_key(self) -> str | None:
        one, other = self.kl_in_loss, self.kl_in_reward
        return (one or other) if self.algorithm == "grpo" else (other or one)


def estimator_of(given: GivenKeys, key: str, known: Mapping[str, Estimator], *, single: str | None = None) -> Estimator:
    """The algorithm and settings of a job that an estimator stands for. Raises BadInput where there is none.

    `single` is the key of the samples of a prompt of a trainer that takes a single one also where samples are compared
    with each other: its advantage is its score then, as REINFORCE has it.
    """
    name = given.value(key)
    if name not in known:
        raise BadInput(f"{key}={name} is no algorithm of a job; configure one of {', '.join(known)}.")
    is_alone = single is not None and known[name].algorithm in COMPARES_GROUPS and given.whole(single) == 1
    return REINFORCE if is_alone else known[name]


def alone_notes(given: GivenKeys, key: str, known: Mapping[str, Estimator], single: str) -> Iterator[str]:
    """A sentence where a single sample of a prompt has none to be compared with."""
    if estimator_of(given, key, known, single=single) is not known[given.value(key)]:
        yield (
            f"{single}=1 with {key}={given.value(key)}: a single sample of a prompt is compared with no other, its "
            "advantage is its score, and it is read as reinforce++."
        )
