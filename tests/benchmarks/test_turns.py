"""The benchmark's lessons are sums that a calculator works out, and what the model has to draw of them is marked."""

from __future__ import annotations

import random

from benchmarks.turns.sums import MOST_POSITIONS, draw_summands, lesson_of, prompt_of, taught_model
from meshwright.runtime.environment.calculator import calculator
from meshwright.runtime.environment.samples import ToolCall
from tests.seeds import seeds


def test_a_lesson_is_calls_and_what_the_calculator_answers_them_up_to_the_sum() -> None:
    assert lesson_of((3, 5, 9)) == [
        ("3+5+9=", False),
        ("<<3+5>>", True),
        ("8", False),
        ("<<8+9>>", True),
        ("17", False),
    ]


@seeds(2, all=8)
def test_what_a_lesson_tells_is_what_the_calculator_answers(seed: int) -> None:
    summands = draw_summands(random.Random(seed))
    [(prompt, _), *turns] = lesson_of(summands)
    assert prompt == prompt_of(summands)
    for number, ((call, is_drawn), (told, is_told)) in enumerate(zip(turns[::2], turns[1::2], strict=True), start=1):
        asked = ToolCall(id="0/0", prompt=prompt, response=call, turn=number, sampled=call)
        assert (calculator([asked]), is_drawn, is_told) == ([told], True, False)
    assert turns[-1][0] == str(sum(summands))
    assert sum(len(text) for text, _ in lesson_of(summands)) < MOST_POSITIONS


def test_the_model_is_the_same_for_the_same_seed() -> None:
    one, other = (taught_model(1).state_dict() for _ in range(2))
    assert all(one[name].equal(other[name]) for name in one)
