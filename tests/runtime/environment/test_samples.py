"""A sample goes to a process or a server as plain values, and comes back as it was."""

from __future__ import annotations

import json

from meshwright.runtime.environment.samples import RewardSample


def test_a_sample_is_what_its_message_says() -> None:
    one = RewardSample(id="3/5", prompt="é", response="b\n", prompt_ids=(1, 2), response_ids=(3,), answer="4")
    assert RewardSample.from_message(json.loads(json.dumps(one.message))) == one
