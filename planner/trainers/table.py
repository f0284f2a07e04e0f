"""The table of a trainer: one row for each of its keys, with the field of a job or a plan that the key sets, how an
import reads it, and how an export writes it.

One importer (`read_table`) and one exporter (`write_table`) follow the tables of all trainers. A row whose key has the
value of one field needs nothing else: `read_field` and `write_field` find the field by its name. Rows that need more
name a function of `reads` or `writes`; functions that only one trainer needs are in the file of its table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

from meshwright.planner.job.job import SETTINGS_KEYS
from meshwright.planner.trainers.parsed_config import ParsedConfig, ParsedField, TrainingSetup
from meshwright.planner.trainers.trainer import ConfigValue, ExportInput, KeyValue
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.stages import GENERATE

STEPS_AHEAD = f"{GENERATE}.steps_ahead"
"""The steps that generation works ahead, among the fields that rows read."""

_FACTS, _SETTING = "facts.", "setting: "

_FIELD_ORDER = (
    "workload",
    "algorithm",
    "reward",
    "models",
    "adapter",
    "generation_weights",
    "cluster",
    "engine",
    "old_logprobs",
)
"""The fields of a job in the order of an import, before its settings and the pins of its stages."""
_PIN_ORDER = ("pool", "layout", "tp", "pp", "micro_batch_tokens", "micro_batch_size", "recompute", "offload")
"""The pins of a stage in the order in which they are made legal: what others depend on comes first."""


def read_field(setup: TrainingSetup, row: Row) -> Iterator[ParsedField]:
    """Read the field of a row: a number for a setting (nothing if the algorithm lacks it), else an integer."""
    if row.field.startswith(_SETTING):
        yield from setup.number_setting(row.setting, row.key)
    elif row.field.startswith(_FACTS):
        name = row.field.removeprefix(_FACTS).removesuffix(".max")
        yield ParsedField(name, setup.config.integer(row.key), (row.key,))
    else:
        _, stage, *_, choice = row.field.split(".")
        yield ParsedField(f"{stage}.{choice}", setup.config.integer(row.key), (row.key,))


def write_field(source: ExportInput, row: Row) -> ConfigValue:
    """The value of a row's field; None where the job or the plan does not have it."""
    if row.field.startswith(_SETTING):
        return getattr(source.settings, row.setting, None)
    if row.field.startswith(_FACTS):
        value: ConfigValue = attrgetter(row.field)(source.plan)
        return value
    _, stage, path = row.field.split(".", 2)
    if stage not in source.plan.graph.by_name:
        return None
    value = attrgetter(path)(source.plan.placement(stage))
    return value


Read: TypeAlias = Callable[[TrainingSetup, "Row"], Iterable[ParsedField]]
"""Reads the fields that a row's key gives; other keys that they depend on have rows of their own."""

Write: TypeAlias = Callable[[ExportInput, "Row"], ConfigValue | KeyValue]
"""The value that an export gives a row's key; None leaves the key out.

It is a KeyValue where the value does not come from the row's field."""


@dataclass(frozen=True)
class Row:
    """A key of a trainer and the field that it sets.

    `field` is a path in the plan ("facts.workload.group_size", "placements.critic_train.layout.tp"), a setting of the
    job's algorithm ("setting: gamma"), or words for what the value comes from ("rule: micro-batches are packed"). An
    export names it as the origin of the value. `read` and `write` are None for keys that are not read or not written.
    `note` is a remark, such as the row with which the key is read.
    """

    key: str
    field: str
    read: Read | None = read_field
    write: Write | None = write_field
    note: str = ""

    @property
    def setting(self) -> str:
        """The name of the setting that the key sets; the field itself where it is not a setting."""
        return self.field.removeprefix(_SETTING)

    def origin(self, source: ExportInput) -> str:
        """The field of the job or the plan that an export's value comes from."""
        if self.field.startswith(_SETTING):
            return f"job: {SETTINGS_KEYS[source.algorithm]}.{self.setting}"
        return self.field


def write_table(table: Iterable[Row], source: ExportInput) -> Iterator[KeyValue]:
    """The keys of a table that express a plan, in the order of the table."""
    for row in table:
        if row.write is not None and (value := row.write(source, row)) is not None:
            yield value if isinstance(value, KeyValue) else KeyValue(row.key, value, row.origin(source))


def read_table(
    table: Iterable[Row],
    setup: TrainingSetup,
    *,
    trainer: str,
    notes: Callable[[TrainingSetup, Sequence[ParsedField]], Iterable[str]],
    unused: Callable[[TrainingSetup], Iterable[str]],
    steps_ahead: int = 0,
) -> ParsedConfig:
    """Read a configuration with a table.

    `notes` yields sentences on what the rows do not express, from the fields that they read, and `unused` patterns of
    keys that have no effect because of other keys. `steps_ahead` is used for a trainer that has no key for it. Raises
    BadInput naming a key that a job cannot express.
    """
    read = [parsed for row in table if row.read is not None for parsed in row.read(setup, row)]
    read = [parsed for parsed in read if not _is_of_missing_stage(parsed, setup)]
    ahead = next((int(parsed.value) for parsed in read if parsed.what == STEPS_AHEAD), steps_ahead)
    fields = sorted((parsed for parsed in read if parsed.what != STEPS_AHEAD), key=_import_order)
    return setup.parsed(trainer, fields, steps_ahead=ahead, notes=list(notes(setup, fields)), unused=unused(setup))


def _is_of_missing_stage(parsed: ParsedField, setup: TrainingSetup) -> bool:
    """True for a field of a stage that the job does not have."""
    stage = parsed.what.partition(".")[0]
    return stage in PPO_GRAPH.by_name and stage not in setup.graph.by_name


def _import_order(parsed: ParsedField) -> tuple[int, int]:
    group, _, choice = parsed.what.partition(".")
    if group in _FIELD_ORDER:
        return _FIELD_ORDER.index(group), 0
    return len(_FIELD_ORDER), _PIN_ORDER.index(choice) if choice in _PIN_ORDER else len(_PIN_ORDER)
