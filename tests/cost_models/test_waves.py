"""Stages that see all that is drawn are costed wave by wave, the others as ever."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from meshwright.cost_models.blended import BlendedModel, cost_model
from meshwright.cost_models.generation_cost import ENGINE_LOAD
from meshwright.cost_models.protocol import StageQuery
from meshwright.cost_models.sampling_waves import WAVE_REWARDS, WavesModel, slowest_seconds
from meshwright.profiles.algorithms import graph_of
from meshwright.profiles.choice_table import ChoiceTable, ScheduleTable
from meshwright.profiles.environment.latency import LatencySpec
from meshwright.profiles.frameworks import VLLM
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.stages import Role
from meshwright.profiles.table import Table
from meshwright.profiles.workload import Workload
from tests.cost_models.test_engine_timings import LOAD, timings_of

GRAPH = graph_of("grpo", has_waves=True)


def query(specs: dict[Role, ModelSpec], name: str) -> StageQuery:
    stage = GRAPH.by_name[name]
    schedule = Schedule(generation_slots=16 if stage.generates else 0)
    return StageQuery(stage=stage, model=specs[stage.role], layout=Layout(dp=2), schedule=schedule)


def test_generation_and_scores_are_of_waves_and_the_rest_of_the_batch(
    shallow: dict[Role, ModelSpec], a100s: Callable[[int], Cluster], fixed: Workload
) -> None:
    wave = fixed.model_copy(update={"batch_size": 96})
    batch, drawn = (cost_model(a100s(2), one, "bf16") for one in (fixed, wave))
    model = WavesModel(batch, wave=drawn, num_waves=1.5, reward_seconds=2.0)
    for name in ("ref_logprob", "actor_logprob", "actor_train"):
        asked = query(shallow, name)
        assert model.seconds(asked) == batch.seconds(asked)
        assert model.memory(asked) == batch.memory(asked)
    scored, generated = query(shallow, "reward_score"), query(shallow, "actor_generate")
    assert model.seconds(scored).total == pytest.approx(1.5 * drawn.seconds(scored).total)
    assert model.seconds(generated).total == pytest.approx(1.5 * drawn.seconds(generated).total + 3.0)
    assert model.seconds(generated).amount(WAVE_REWARDS) == 3.0
    assert model.memory(generated) == drawn.memory(generated)
    assert model.on_layout(scored).seconds(scored.schedule) == model.seconds(scored).total


def test_an_engine_takes_the_weights_of_a_step_once_for_all_its_waves(
    table: Table, shallow: dict[Role, ModelSpec], a100s: Callable[[int], Cluster], fixed: Workload
) -> None:
    timed = table.with_timings(timings_of(shallow[Role.ACTOR], fixed))
    wave = BlendedModel(timed, a100s(2), fixed, "bf16", VLLM)
    model = WavesModel(wave, wave=wave, num_waves=3.0, reward_seconds=2.0)
    asked = query(shallow, "actor_generate")
    one, all_waves = wave.seconds(asked), model.seconds(asked)
    assert one.amount(ENGINE_LOAD) == all_waves.amount(ENGINE_LOAD) == LOAD[2]
    assert all_waves.total == pytest.approx(3 * (one.total - LOAD[2]) + LOAD[2] + 3 * 2.0)
    choices = ChoiceTable.from_product([asked.layout], [ScheduleTable((asked.schedule,))])
    assert model.seconds_of_choices(asked, choices).seconds.tolist() == [all_waves.total]
    assert model.generation_lower_bound(asked) <= all_waves.total


def test_the_slowest_of_many_calls_is_what_it_is_on_average() -> None:
    law = LatencySpec(mean=2.0, p99=10.0).resolve()
    drawn = np.random.default_rng(0).choice(law.seconds, (4000, 32), p=law.probabilities).max(1).mean()
    assert slowest_seconds([law], 32) == pytest.approx(drawn, rel=0.03)
    assert slowest_seconds([LatencySpec(fixed=3.0).resolve(), law], 1) > 3.0
    assert slowest_seconds([LatencySpec(fixed=3.0).resolve()], 100) == pytest.approx(3.0)
