import numpy as np

from meshwright.cost_models.blended import cost_model
from meshwright.planner.plan.cost_queries import query_for_choice
from meshwright.planner.search.choice_costs import Candidate, CostedChoices, cost_query, undominated
from meshwright.planner.search.legal_choices import legal_choices
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.choice_table import ChoiceTable, ScheduleTable
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Schedule
from tests.planner.jobs import small_facts


def candidate(layout: str, seconds: float, num_bytes: float) -> Candidate:
    return Candidate(Layout.parse(layout), Schedule(), seconds, seconds, num_bytes, 0.0, 0.0, 0.0)


def test_a_choice_is_costed_as_the_model_answers() -> None:
    facts = small_facts()
    model = cost_model(facts.cluster, facts.workload, facts.precision)
    for name in ("actor_generate", "ref_logprob", "critic_train"):
        stage = PPO_GRAPH.by_name[name]
        choice = next(legal_choices(facts, stage, 4, ()))
        call = query_for_choice(facts, stage, choice, deferral=0)
        found, memory = cost_query(model, call), model.memory(call)
        assert (found.choice, found.seconds) == (choice, model.seconds(call).total)
        assert found.peak_bytes == memory.resident.total + memory.transient.total
        assert 0 < found.weights_bytes <= found.resident_bytes


def test_of_equals_the_first_stays_and_what_is_slower_and_larger_goes() -> None:
    first, same, worse = candidate("dp4", 1.0, 2.0), candidate("tp2,dp2", 1.0, 2.0), candidate("pp4", 2.0, 3.0)
    other = candidate("pp2,dp2", 2.0, 1.0)
    assert undominated([first, same, worse, other]) == (first, other)


def costed(*candidates: Candidate) -> CostedChoices:
    tables = [ScheduleTable((one.schedule,)) for one in candidates]
    choices = ChoiceTable.from_product([one.layout for one in candidates], tables)
    columns = zip(*(one[2:8] for one in candidates), strict=True)
    return CostedChoices(choices, *(np.array(column) for column in columns))


def test_each_layout_keeps_its_own_and_one_in_chunks_what_no_fewer_chunks_beat() -> None:
    plain, apart = candidate("pp2,dp2", 2.0, 2.0), candidate("dp4", 3.0, 3.0)
    quicker, larger = candidate("pp2,dp2,vpp2", 1.0, 3.0), candidate("pp2,dp2,vpp4", 1.0, 4.0)
    table = costed(plain, apart, quicker, larger)
    assert set(table.candidates(table.undominated_by_layout())) == {plain, apart, quicker}
    assert set(table.candidates(table.undominated())) == {plain, quicker}
