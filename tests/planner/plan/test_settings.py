"""Facts with some fields set otherwise: every combination of values, and a sentence for what cannot be set."""

from __future__ import annotations

import json

import pytest

from meshwright.planner.job.job import Facts
from meshwright.planner.job.whatif_settings import parse_settings, parse_sweep, require_known_fields, with_setting
from meshwright.profiles.errors import BadInput
from meshwright.profiles.lengths import LengthSpec
from tests.planner.jobs import small_facts


def facts() -> Facts:
    """Four ranks on two nodes; responses of median 40 and p99 100."""
    found = small_facts(nodes=2, ranks_per_node=2, memory_bytes=2**34)
    workload = found.workload.model_copy(update={"response": LengthSpec(max=128, median=40, p99=100)})
    return found.model_copy(update={"workload": workload})


def test_every_combination_of_several_settings_is_answered() -> None:
    settings = parse_settings(["cluster.nodes=2,4", "workload.batch_size=16,32", "precision=bf16"])
    assert settings == tuple(
        {"cluster.nodes": nodes, "workload.batch_size": size, "precision": "bf16"}
        for nodes in (2, 4)
        for size in (16, 32)
    )


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nodes", "did you mean cluster.nodes?"),
        ("cluster.nodess", "did you mean cluster.nodes"),
        ("workload.respnse.p99", "did you mean workload.prompt.p99 or workload.response.p99?"),
        (
            "qqqq",
            "known: algorithm, cache_after_refit, cluster, controllers, engine, generation_weights, models, "
            "old_logprobs, precision, ref_is_base, rewards, staleness, teacher_top_k, tokenizer, workload and the "
            "fields in them.",
        ),
    ],
)
def test_an_unknown_field_is_told_the_nearest_names(path: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        with_setting(facts(), {path: 1})
    assert said in str(refused.value)


@pytest.mark.parametrize("text", ["cluster.nodes", "=4", "cluster.nodes="])
def test_a_setting_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="is not of the form field=value"):
        parse_settings([text])


def test_a_field_that_is_set_twice_is_refused() -> None:
    with pytest.raises(BadInput, match="given twice"):
        parse_settings(["cluster.nodes=2", "cluster.nodes=4"])


def test_a_value_that_breaks_a_rule_is_refused() -> None:
    with pytest.raises(BadInput, match=r"cluster\.nodes is 0"):
        with_setting(facts(), {"cluster.nodes": 0})


def test_devices_and_networks_are_given_by_name() -> None:
    found = with_setting(facts(), {"cluster.device": "a100-80gb", "cluster.inter_node": "ib-ndr-400"})
    assert found.cluster.device.name == "a100-80gb"
    assert found.cluster.inter_node != facts().cluster.inter_node


def test_a_list_is_one_value() -> None:
    (setting,) = parse_settings(["workload.response.histogram=[[10, 1], [20, 3]]"])
    assert setting == {"workload.response.histogram": [[10, 1], [20, 3]]}


def test_more_combinations_than_anybody_reads_are_refused() -> None:
    numbers = ",".join(map(str, range(1, 41)))
    with pytest.raises(BadInput, match="--set asks for 1600 combinations of values; give 1000 at most"):
        parse_settings([f"cluster.nodes={numbers}", f"workload.batch_size={numbers}"])


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity"])
def test_a_number_that_is_none_is_refused(number: str) -> None:
    with pytest.raises(BadInput, match="is not a finite number; use one"):
        parse_settings([f"workload.response.p99={number}"])


def test_what_a_field_holds_may_be_set_as_a_whole_and_nothing_else_changes() -> None:
    asked = facts()
    found = with_setting(asked, {"workload.response": {"max": 9, "fixed": 7}})
    assert found.workload.response == LengthSpec(max=9, fixed=7)
    expected = json.loads(asked.model_dump_json())
    expected["workload"]["response"] = json.loads(found.workload.response.model_dump_json())
    assert json.loads(found.model_dump_json()) == expected


def test_a_sweep_takes_ranges_with_both_ends_and_lists() -> None:
    settings = parse_sweep(["cluster.nodes=1:8:3", "staleness=0:1", "precision=bf16,bf16"])
    assert settings == tuple(
        {"cluster.nodes": nodes, "staleness": staleness, "precision": "bf16"}
        for nodes in (1, 4, 7)
        for staleness in (0, 1)
    )
    assert parse_sweep(["cluster.nodes=3:3"]) == ({"cluster.nodes": 3},)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster.nodes", "is not of the form field=value,value or field=first:last, such as cluster.nodes=1:8."),
        ("cluster.nodes=8:1", "--sweep cluster.nodes=8:1 has no number, since 1 is less than 8; write 1:8."),
        ("cluster.nodes=1:x", "is not a range of whole numbers, first:last or first:last:step; write it like"),
        ("cluster.nodes=1:8:2:2", "is not a range of whole numbers"),
        ("cluster.nodes=1:", "is not a range of whole numbers"),
        ("cluster.nodes=1:8:0", "has a step of 0; use 1 or more."),
        ("cluster.nodes=1,,2", "has an empty value"),
        ("cluster.nodes=1:2000", "has 2000 numbers; give 1000 at most, or a larger step."),
        ("workload.response.scale=1e999", "is not a finite number"),
    ],
)
def test_a_range_that_cannot_be_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_sweep([text])
    assert said in str(refused.value)


def test_too_many_points_and_unknown_fields_of_a_sweep_are_refused() -> None:
    with pytest.raises(BadInput, match="--sweep asks for 1100 combinations of values; give 1000 at most"):
        parse_sweep(["cluster.nodes=1:100", "workload.batch_size=1:11"])
    with pytest.raises(BadInput, match=r"--sweep cluster.node: .* did you mean cluster.nodes"):
        require_known_fields(facts(), parse_sweep(["cluster.node=1:4"]))
