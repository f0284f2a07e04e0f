"""The calculator answers arithmetic and nothing else."""

from __future__ import annotations

import pytest

from meshwright.runtime.environment.calculator import calculator
from meshwright.runtime.environment.samples import ToolCall


def value(sampled: str) -> str:
    (answer,) = calculator([ToolCall(id="0/0", prompt="", response=sampled, turn=1, sampled=sampled)])
    return answer


@pytest.mark.parametrize(
    ("sampled", "answer"),
    [
        ("<<12+7>>", "19"),
        ("so 48/2 = <<48/2>>", "24"),
        ("<<1+1>>2 and <<-3*(2-5)>>", "9"),
        ("<<1/3>>", "0.333333"),
        ("<<0.1+0.2>>", "0.3"),
    ],
)
def test_the_last_expression_has_its_value(sampled: str, answer: str) -> None:
    assert value(sampled) == answer


@pytest.mark.parametrize("sampled", ["<<>>", ">>", "<<2**99>>", "<<1/0>>", "<<x>>", "<<True>>", "<<9*" * 100, "<<(((("])
def test_what_is_no_arithmetic_is_an_error(sampled: str) -> None:
    assert value(sampled) == "error"
