"""A sample goes to a process or a server as plain values, and comes back as it was."""

from __future__ import annotations

import json

import pytest

from meshwright.runtime.environment.samples import RewardSample


def test_a_sample_is_what_its_message_says() -> None:
    one = RewardSample(id="3/5", prompt="é", response="b\n", prompt_ids=(1, 2), response_ids=(3,), answer="4")
    assert RewardSample.from_message(json.loads(json.dumps(one.message))) == one


def test_messages_of_a_chat_come_back_as_they_were() -> None:
    chat = ({"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "é"}]})
    one = RewardSample(id="3/5", prompt="s é", response="b", messages=chat)
    assert json.loads(json.dumps(one.message))["messages"] == list(chat)
    assert RewardSample.from_message(json.loads(json.dumps(one.message))) == one


def test_a_field_is_an_attribute_and_an_item() -> None:
    one = RewardSample(id="3/5", prompt="p", response="r", answer="4")
    assert (one["response"], one["answer"], one["prompt_ids"]) == (one.response, one.answer, one.prompt_ids)
    with pytest.raises(KeyError, match="a sample has no 'text'; it has id, prompt, response, prompt_ids"):
        one["text"]
