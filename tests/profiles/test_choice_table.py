"""A table of choices has each choice once, in order, and its columns say of each what its layout and schedule say."""

import numpy as np

from meshwright.profiles.choice_table import ChoiceTable, ScheduleTable
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Recompute, Schedule

BY_ROWS = ScheduleTable((Schedule(), Schedule(micro_batch_size=4, recompute=Recompute.FULL, offload=Offload.OPTIMIZER)))
BY_TOKENS = ScheduleTable(
    (
        Schedule(micro_batch_size=0, micro_batch_tokens=512),
        Schedule(micro_batch_size=0, micro_batch_tokens=512, recompute=Recompute.SELECTIVE),
        Schedule(chunk_tokens=128),
    )
)
LAYOUTS = Layout(tp=2, dp=2, sp=True), Layout(tp=4, pp=2, dp=4, ep=8, etp=1)
TABLE = ChoiceTable.from_product(LAYOUTS, (BY_ROWS, BY_TOKENS))


def test_every_layout_is_there_with_every_schedule_of_its_own_table() -> None:
    expected = [
        (layout, one) for layout, table in zip(LAYOUTS, (BY_ROWS, BY_TOKENS), strict=True) for one in table.schedules
    ]
    assert list(TABLE) == expected
    assert len(TABLE) == 5


def test_a_column_says_what_each_layout_says() -> None:
    for axis in ("tp", "pp", "dp", "sp", "cp", "ep", "etp", "vpp", "fold_size", "expert_replicas", "num_ranks"):
        assert getattr(TABLE.layout, axis).tolist() == [getattr(layout, axis) for layout, _ in TABLE], axis


def test_a_column_says_what_each_schedule_says() -> None:
    for name in (
        *("micro_batch_size", "micro_batch_tokens", "chunk_tokens"),
        *("is_recomputed", "is_attention_recomputed"),
    ):
        assert getattr(TABLE, name).tolist() == [getattr(schedule, name) for _, schedule in TABLE], name
    assert TABLE.offloads == (Offload.NONE, Offload.OPTIMIZER)
    assert TABLE.has_offload(Offload.OPTIMIZER).tolist() == [False, True, False, False, False]


def test_choices_that_are_filtered_keep_their_order_and_their_columns() -> None:
    kept = TABLE.filter(np.array([False, True, False, True, True]))
    assert list(kept) == [choice for index, choice in enumerate(TABLE) if index in (1, 3, 4)]
    assert kept.layout.tp.tolist() == [2, 4, 4]
    assert kept.chunk_tokens.tolist() == [0, 0, 128]
    assert kept.offloads == (Offload.NONE, Offload.OPTIMIZER)


def test_tables_are_joined_in_order() -> None:
    first, second = TABLE.filter(np.arange(5) < 2), TABLE.filter(np.arange(5) > 2)
    joined = ChoiceTable.concatenate([first, second])
    assert list(joined) == [*first, *second]
    assert joined.layout.num_ranks.tolist() == [4, 4, 32, 32]


def test_amounts_of_a_layouts_table_go_to_its_choices() -> None:
    kept = TABLE.filter(np.array([False, True, True, False, True]))
    amounts = kept.gather_by_schedule([np.array([[1.0, 2.0]]), np.array([[3.0, 4.0, 5.0]])])
    assert amounts.tolist() == [[2.0, 3.0, 5.0]]
    assert kept.layout.expand_to_choices([(10.0, 1.0), (20.0, 2.0)]).tolist() == [[10.0, 20.0, 20.0], [1.0, 2.0, 2.0]]


def test_schedules_that_split_a_batch_alike_are_split_once() -> None:
    assert [split.micro_batch_tokens for split in BY_TOKENS.batch_splits] == [512, 0]
    assert BY_TOKENS.batch_split_index.tolist() == [0, 0, 1]
    assert {size: rows.tolist() for size, rows in BY_TOKENS.has_chunk_size.items()} == {128: [False, False, True]}
