"""How an import reads the keys of a table: functions from a configuration to the fields that a row's key gives.

A reader (`Read`) takes a setup and a row and yields fields. Functions here with these two parameters are readers, such
as `group_size`; the others return a reader that depends on their arguments, such as `batch_size`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from meshwright.planner.job.job import DEFAULT_SETTINGS, SETTINGS_KEYS
from meshwright.planner.trainers.parsed_config import MEMORY_SHARE, FieldValue, ParsedField, TrainingSetup
from meshwright.planner.trainers.table import Read, Row
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import Role


def batch_size(group_key: str) -> Read:
    """The number of sequences in a step: the row's key has its prompts, and `group_key` the samples of each prompt."""

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        size = setup.config.integer(row.key) * setup.config.integer(group_key)
        yield ParsedField("workload.batch_size", size, (row.key, group_key))

    return read


def group_size(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """The samples of a prompt. Raises BadInput where the algorithm compares them and there is only one."""
    yield from setup.group(setup.config.integer(row.key), row.key)


def estimator(setup: TrainingSetup, _row: Row) -> Iterator[ParsedField]:
    """The algorithm, and the settings that its name implies."""
    yield from setup.algorithm_fields()


def minibatches(size: Callable[[TrainingSetup], int], unit: str = "sequences") -> Read:
    """The number of updates in a step: the row's key has the size of an update, and `size` gives that of the step.

    Both sizes are in `unit`. The reader raises BadInput for a size of an update below 1.
    """

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        each = setup.config.integer(row.key)
        if each < 1:
            raise BadInput(f"{row.key}={each} {unit} are not a minibatch; use 1 or more.")
        yield ParsedField("workload.num_minibatches", max(1, size(setup) // each), (row.key,))

    return read


def models(*roles: Role) -> Read:
    """One path for the models of these roles; roles that the job does not have are left out."""

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        for role in roles:
            if role in setup.graph.roles:
                yield ParsedField(f"models.{role}", str(setup.config.text(row.key)), (row.key,))

    return read


def ref_path(actor_key: str) -> Read:
    """The path of the reference model, which is the actor's if the row's key has no value."""

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        if Role.REF in setup.graph.roles:
            key = row.key if setup.config.value(row.key) else actor_key
            yield ParsedField(f"models.{Role.REF}", str(setup.config.text(key)), (key,))

    return read


def old_logprobs(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """The source of the log-probabilities before the updates, where it is not a forward pass of the actor."""
    if setup.old_logprobs != "recompute":
        yield ParsedField("old_logprobs", setup.old_logprobs, (row.key,))


def function_reward(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """The reward function. It may come from several keys, and the row of the first of them reads it."""
    if setup.reward is not None and setup.reward.keys[0] == row.key:
        yield from setup.reward.fields()


def kl_penalty(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """The coefficient of the KL penalty, where it is read from this key."""
    if row.key == setup.kl_key:
        yield from setup.number_setting("kl_coefficient", row.key)


def number(setting: str) -> Read:
    """A numeric setting, if the algorithm has it."""
    return lambda setup, row: setup.number_setting(setting, row.key)


def whole_number(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """A setting that is a whole number, if the algorithm has it."""
    if setup.config.value(row.key) is not None:
        yield from setup.setting(row.setting, setup.config.integer(row.key), row.key)


def flag(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """A setting that is true or false."""
    yield from setup.setting(row.setting, bool(setup.config.value(row.key)), row.key)


def loss_mean(names: Mapping[object, FieldValue]) -> Read:
    """How the loss is averaged, by the trainer's name for it; nothing for a name that a job cannot have."""

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        if mean := names.get(setup.config.value(row.key)):
            yield from setup.setting("loss_mean", mean, row.key)

    return read


def top_p(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Nucleus sampling; an absent value means all tokens."""
    if setup.config.value(row.key) is not None:
        yield from setup.setting("top_p", setup.config.number(row.key), row.key)


def top_k(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Top-k sampling; a trainer's -1 and an absent value mean all tokens."""
    if setup.config.value(row.key) is not None:
        yield from setup.setting("top_k", max(0, setup.config.integer(row.key)), row.key)


def warmup_steps(role: Role) -> Read:
    """The steps over which the learning rate of a role warms up."""

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        key = SETTINGS_KEYS[setup.algorithm]
        if f"{role}_schedule" not in type(DEFAULT_SETTINGS[key]).model_fields:
            return
        if setup.config.value(row.key) is not None and setup.config.integer(row.key) > 0:
            yield ParsedField(f"{key}.{role}_schedule.warmup_steps", setup.config.integer(row.key), (row.key,))

    return read


def overlong_tokens(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """The tokens before the maximum length of a response over which DAPO's length penalty grows."""
    if setup.config.value(row.key):
        yield from setup.setting("overlong_tokens", setup.config.integer(row.key), row.key)


def overlong_penalty(length_key: str) -> Read:
    """DAPO's largest length penalty, if `length_key` gives the number of tokens over which it grows."""

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        if setup.config.value(length_key) and setup.config.value(row.key) is not None:
            yield from setup.setting("overlong_penalty", setup.config.number(row.key), row.key)

    return read


def adapter_rank(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """The rank of the actor's LoRA adapter, where it has one."""
    if setup.config.value(row.key):
        yield ParsedField("adapter.rank", setup.config.integer(row.key), (row.key,))


def adapter_alpha(rank_key: str) -> Read:
    """The alpha of the actor's LoRA adapter; its rank where there is none."""

    def read(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
        if setup.config.value(rank_key):
            has_alpha = bool(setup.config.value(row.key))
            alpha = setup.config.number(row.key) if has_alpha else setup.config.integer(rank_key)
            yield ParsedField("adapter.alpha", alpha, (row.key,))

    return read


def memory_share(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """The share of a device's memory that the inference engine may take."""
    yield ParsedField(MEMORY_SHARE, setup.config.number(row.key), (row.key,))


def if_given(read: Read) -> Read:
    """Read a key only where it has a value."""
    return lambda setup, row: () if setup.config.value(row.key) is None else read(setup, row)


def if_(condition: Callable[[TrainingSetup], bool], read: Read) -> Read:
    """Read the key only under a condition."""
    return lambda setup, row: read(setup, row) if condition(setup) else ()
