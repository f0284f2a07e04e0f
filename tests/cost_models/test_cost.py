import pytest

from meshwright.cost_models.cost import Cost, Memory, Source, Tally, Term, least_trusted, total


def test_terms_sum_to_the_total() -> None:
    cost = Cost((Term("a", 1.5), Term("b", 2.0)))
    assert cost.total == 3.5
    assert (cost + cost).total == 7.0
    assert cost.scaled(2).total == 7.0
    assert total([cost, cost]) == Cost((Term("a", 3.0), Term("b", 4.0)))


def test_a_cost_is_as_trusted_as_its_worst_term() -> None:
    cost = Cost((Term("a", 1.0, Source.MEASURED), Term("b", 1.0, Source.EXTRAPOLATED), Term("c", 1.0)))
    assert cost.source is Source.EXTRAPOLATED
    assert Cost().source is Source.MEASURED
    assert least_trusted([Source.ANALYTIC, Source.INTERPOLATED]) is Source.ANALYTIC


def test_merging_keeps_sources_apart() -> None:
    cost = Cost((Term("a", 1.0, Source.MEASURED), Term("a", 2.0), Term("a", 3.0, Source.MEASURED)))
    assert cost.merged() == Cost((Term("a", 4.0, Source.MEASURED), Term("a", 2.0)))


def test_a_tally_adds_by_name_and_leaves_out_nothings() -> None:
    tally = Tally()
    tally.add("a", 1.0, Source.MEASURED)
    tally.add("a", 2.0, Source.EXTRAPOLATED)
    tally.add("b", 0.0)
    assert tally.cost() == Cost((Term("a", 3.0, Source.EXTRAPOLATED),))


def test_memory_peaks_at_resident_and_transient_together() -> None:
    memory = Memory(resident=Cost((Term("weights", 10.2),)), transient=Cost((Term("activations", 5.1),)))
    assert (memory.resident_bytes, memory.peak_bytes) == (11, 16)
    assert memory.resident.total + memory.transient.total == pytest.approx(15.3)
