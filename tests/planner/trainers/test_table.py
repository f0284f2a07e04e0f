"""The tables of the trainers: a row for each key that is read or written, and no key in two rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.planner.trainers import areal, nemo_rl, openrlhf, skyrl, slime, verl
from meshwright.planner.trainers.config_keys import known_keys
from meshwright.planner.trainers.registry import READERS
from meshwright.planner.trainers.table import Row, write_table
from meshwright.planner.trainers.trainer import ExportInput
from meshwright.profiles.errors import BadInput
from tests.planner.trainers.plans import best
from tests.planner.trainers.test_key_effects import FILLED, IN_YAML, READ

TABLES = {
    "verl": (verl.TABLE,),
    "openrlhf": (openrlhf.TABLE,),
    "slime": (slime.TABLE,),
    "skyrl": (skyrl.TABLE,),
    "areal": (areal.TABLE,),
    "nemo_rl": (nemo_rl.TABLES["ppo"],),
    "nemo_rl_grpo": (nemo_rl.TABLES["grpo"],),
}


def row_of(table: tuple[Row, ...], key: str) -> Row:
    (row,) = (row for row in table if row.key == key)
    return row


@pytest.mark.parametrize("file", TABLES)
def test_a_key_has_one_row_and_says_how_it_is_read_or_written_or_why_it_is_neither(file: str) -> None:
    for table in TABLES[file]:
        keys = [row.key for row in table]
        assert len(set(keys)) == len(keys)
        assert [row.key for row in table if row.read is None and row.write is None and not row.note] == []


@pytest.mark.parametrize("trainer", READ)
def test_every_key_that_a_field_comes_from_has_a_row(trainer: str, tmp_path: Path) -> None:
    keys = {row.key for file in TABLES if file.startswith(trainer.replace("-", "_")) for t in TABLES[file] for row in t}
    path = tmp_path / ("run.yaml" if trainer in IN_YAML else "run.sh")
    for text in READ[trainer]:
        path.write_text(text if trainer in IN_YAML else text.format(**FILLED))
        found = READERS[trainer].read(path)
        assert {key for parsed in found.fields for key in parsed.keys} <= keys


@pytest.mark.parametrize("file", ["verl", "openrlhf", "slime", "skyrl", "areal", "nemo_rl"])
def test_every_key_that_is_written_is_one_of_the_trainers(file: str) -> None:
    (table,), known = TABLES[file], known_keys(file)
    assert [row.key for row in table if row.write is not None and not known.knows(row.key)] == []


def test_one_row_says_what_a_key_becomes_and_what_writes_it(tmp_path: Path) -> None:
    row = row_of(verl.TABLE, "actor_rollout_ref.rollout.n")
    assert row.field == "facts.workload.group_size"
    plan = best("verl", algorithm="grpo").plan
    (written,) = write_table([row], ExportInput(plan=plan))
    assert (written.value, written.origin) == (plan.facts.workload.group_size, row.field)
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo data.train_batch_size=8 {row.key}=4\n")
    found = READERS["verl"].read(tmp_path / "run.sh").by_name
    assert (found["workload.group_size"], found["workload.batch_size"]) == (4, 32)


@pytest.mark.parametrize(
    ("trainer", "command", "sentence"),
    [
        (
            "verl",
            "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.ppo_mini_batch_size=0",
            "actor_rollout_ref.actor.ppo_mini_batch_size=0 prompts are not a minibatch; use 1 or more",
        ),
        (
            "openrlhf",
            "python3 -m openrlhf.cli.train_ppo_ray --train.colocate_all --train.batch_size 0",
            "train.batch_size=0 sequences are not a minibatch; use 1 or more",
        ),
        (
            "slime",
            "python3 train.py --colocate --rollout-batch-size 8 --rollout-max-response-len 8 --lora-rank 4 "
            "--lora-alpha much",
            "lora-alpha='much' is not a number; give one",
        ),
    ],
)
def test_a_minibatch_of_nothing_and_a_word_for_a_number_are_refused_by_their_key(
    tmp_path: Path, trainer: str, command: str, sentence: str
) -> None:
    (tmp_path / "run.sh").write_text(command + "\n")
    with pytest.raises(BadInput, match=sentence):
        READERS[trainer].read(tmp_path / "run.sh")
