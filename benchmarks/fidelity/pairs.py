"""How much quicker an asynchronous step is than the synchronous one of the same job: the ratio of their seconds.

Where layouts and lengths are stated (NeMo-RL) both steps are predicted. Where only the stage times of the synchronous
step and the two pools are (verl), each stage is scaled to its pool, and the step takes as long as the slower pool.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.fidelity.assumed import Verl, assumed
from benchmarks.fidelity.grpo import step_seconds
from benchmarks.fidelity.rows import Row, Skip, number
from benchmarks.fidelity.score import Answer
from meshwright.cost_models.cost import Cost, Tally

_SYNC = "sync "
"""Before the names of the columns that come from the synchronous row of a pair."""

_POOLS = re.compile(r"(\d+)(?: gen)? ?: ?(\d+)")
_SAME = ("system", "model_actor", "gpu", "source", "precision")
_SAME_JOB = ("num_gpus", "batch_prompts", "response_len_tok")
"""What pairs of verl agree in besides; NeMo-RL's differ in ranks and in the mean length that was drawn."""


def is_of_pairs(row: Row) -> bool:
    return row["system"].startswith("NeMo-RL") or row["system"] == "veRL"


def pairs(rows: Iterable[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
    """Each asynchronous row with the columns of the synchronous one of its job, where there is one."""
    stated = list(rows)
    for stem, row in stated:
        if row["mode"] != "sync":
            partner = next((other for _, other in stated if other["mode"] == "sync" and _are_pair(row, other)), {})
            yield stem, {**row, **{_SYNC + column: value for column, value in partner.items()}}


def speedup(_stem: str, row: Row) -> Answer:
    """Seconds of the synchronous step over seconds of the asynchronous one."""
    sync = synchronous(row)
    measured = number(sync, "step_time_s") / number(row, "step_time_s")
    if row["system"] == "veRL":
        cost = scaled_of(row).seconds(assumed().verl)
        predicted = number(sync, "step_time_s") / cost.total
    else:
        cost = step_seconds(row)
        predicted = step_seconds(sync).total / cost.total
    label = f"{row['system']} {row['model_actor']} {row['gpu']} x{row['num_gpus'][:3]} {row['mode']}"
    return Answer(label=label, measured=measured, predicted=predicted, terms=cost)


def synchronous(row: Row) -> Row:
    """The synchronous row of a pair; skips a row that has none."""
    found = {column.removeprefix(_SYNC): value for column, value in row.items() if column.startswith(_SYNC)}
    if not found:
        raise Skip("no synchronous row of the same job with these columns")
    return found


@dataclass(frozen=True)
class Scaled:
    """Stage times of a synchronous step on all ranks, and what part of the ranks each stage has when asynchronous."""

    generation_seconds: float
    training_seconds: float
    generation_share: float
    training_share: float
    works_ahead: bool

    def seconds(self, verl: Verl) -> Cost:
        """The slower pool. A part of generating is work, which more ranks share, and the rest waits for the longest
        responses, unless the next ones are begun meanwhile; training is quicker without an engine on its ranks."""
        work = verl.work_share * self.generation_seconds / self.generation_share
        waiting = 0.0 if self.works_ahead else (1 - verl.work_share) * self.generation_seconds
        training = verl.alone_share * self.training_seconds / self.training_share
        tally = Tally()
        tally.add("training", training)
        tally.add("wait for generation", max(0.0, work + waiting - training))
        return tally.cost()


def scaled_of(row: Row) -> Scaled:
    """The stages of a pair of verl; log-probabilities are computed again where the asynchronous row has them too."""
    sync, pools = synchronous(row), _POOLS.search(row["parallel_config"].partition(";")[2])
    if pools is None:
        raise Skip("the ranks of the two pools are not stated")
    generating, training = int(pools[1]), int(pools[2])
    again = number(sync, "infer_logprob_s") if row["infer_logprob_s"] else 0.0
    return Scaled(
        generation_seconds=number(sync, "gen_s"),
        training_seconds=number(sync, "train_s") + again,
        generation_share=generating / (generating + training),
        training_share=training / (generating + training),
        works_ahead=row["mode"].startswith("fully async"),
    )


def _are_pair(row: Row, other: Row) -> bool:
    if any(row[column] != other[column] for column in _SAME):
        return False
    if row["system"] != "veRL":
        return True
    engine = row["parallel_config"].partition(";")[0] == other["parallel_config"].partition(";")[0]
    return engine and all(row[column] == other[column] for column in _SAME_JOB)
