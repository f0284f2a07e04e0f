"""What calls are given is looked at before anything begins."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright import api
from meshwright.runtime.api.arguments import limits_of, require_number


@pytest.mark.parametrize("value", [0, -1, 11, math.nan, math.inf, -math.inf])
def test_a_number_out_of_its_range_is_told_the_range(value: float) -> None:
    with pytest.raises(api.BadInput, match=f"steps={value} is out of range; give 1 to 10."):
        require_number("steps", value, minimum=1, maximum=10)


def test_infinity_is_no_number_where_no_bound_is_said() -> None:
    require_number("price", 1e300, minimum=0)
    require_number("price", None, minimum=0)
    with pytest.raises(api.BadInput, match=r"^price=inf is out of range; give 0 or more\.$"):
        require_number("price", math.inf, minimum=0)


def test_a_gap_is_a_share() -> None:
    assert limits_of(None) == api.Limits()
    with pytest.raises(api.BadInput, match=r"^gap=1 is out of range; give 0 to 0\.99\.$"):
        limits_of(api.Limits(gap=1))


CALLS: dict[str, Callable[[api.Plan], object]] = {
    "explain": api.explain,
    "structures": lambda plan: api.structures(plan, count=2),
    "whatif": lambda plan: api.whatif(plan, [{"cluster.nodes": 2}]),
    "simulate": api.simulate,
    "rehearse": api.rehearse,
    "calibrate": lambda plan: api.calibrate(plan, "nowhere"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_plan_that_breaks_a_rule_is_refused_by_whatever_is_asked_about_it(name: str, small_plan: api.Plan) -> None:
    broken = small_plan.model_copy(update={"period_seconds": 1e6})
    assert api.verify(small_plan) == ()
    with pytest.raises(api.BadInput) as refused:
        CALLS[name](broken)
    assert str(refused.value) == f"plan: {api.verify(broken)[0]}"


NUMBERS: dict[str, Callable[[api.Plan], object]] = {
    "count": lambda plan: api.structures(plan, count=0),
    "price": lambda plan: api.explain(plan, price=math.nan),
    "gap": lambda plan: api.whatif(plan, [], limits=api.Limits(gap=-1)),
    "steps": lambda plan: api.simulate(plan, steps=0),
    "seed": lambda plan: api.simulate(plan, seed=-1),
    "speed": lambda plan: api.rehearse(plan, speed=math.nan),
    "ranks_per_process": lambda plan: api.rehearse(plan, ranks_per_process=0),
    "minutes": lambda plan: api.profile(plan.facts, "table.json", minutes=-1),
    "num_ranks": lambda _: api.export_models("run", "models", num_ranks=0),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_means_nothing_is_refused(
    name: str, small_plan: api.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(api.BadInput, match=f"{name}=.* is out of range; give "):
        NUMBERS[name](small_plan)
    assert list(tmp_path.iterdir()) == []
