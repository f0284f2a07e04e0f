"""The schema command: each document's schema, and no other's."""

from __future__ import annotations

import json

from tests.runtime.command import Call


def test_the_schema_of_each_document_is_json(call: Call) -> None:
    for document in ("plan", "table"):
        outcome = call("schema", document)
        assert json.loads(outcome.out)["type"] == "object"


def test_the_schema_of_a_job_is_one_for_each_algorithm(call: Call) -> None:
    schema = json.loads(call("schema", "job").out)
    kinds = [schema["$defs"][one["$ref"].removeprefix("#/$defs/")] for one in schema["anyOf"]]
    keys = [{"ppo", "grpo", "rloo", "reinforce", "distill"} & kind["properties"].keys() for kind in kinds]
    assert keys == [{"ppo"}, {"grpo"}, {"rloo"}, {"reinforce"}, {"distill"}, set()]
    assert all(kind["additionalProperties"] is False for kind in kinds)


def test_a_document_that_is_not_known_is_refused_with_the_nearest(call: Call) -> None:
    outcome = call("schema", "jobs")
    assert outcome.code == 2
    assert "argument 'jobs' is not known; did you mean 'job'?" in outcome.err
