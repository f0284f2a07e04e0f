"""A pin has one canonical text, and what cannot be fixed or forbidden is refused in a sentence."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.pins import Pin, Ranks, forbidden, parse_pin, parse_pins, value_of
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.errors import BadInput
from meshwright.profiles.layout import Layout
from meshwright.profiles.schedule import Offload, Recompute, Schedule


def test_a_pin_is_read_and_written_in_one_form() -> None:
    assert str(parse_pin("actor_train . layout = tp2,dp2", PPO_GRAPH)) == "actor_train.layout=tp2,pp1,dp2"
    assert parse_pin("critic_train.pool=4:4", PPO_GRAPH) == Pin("critic_train", "pool", Ranks(4, 4))
    assert parse_pin("critic_train.recompute=selective", PPO_GRAPH).value is Recompute.SELECTIVE


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("actor_train", "is not of the form stage.key=value"),
        ("actor_trian.layout=tp1", "there is no stage 'actor_trian'; did you mean 'actor_train'?"),
        ("actor_train.layuot=tp1", "there is no key 'layuot'; did you mean 'layout'?"),
        ("actor_train.pool=4", "'4' is not a pool; write first:number, such as 0:4, or 0-3."),
        ("actor_train.micro_batch_size=two", "'two' is not a whole number; use 1 or more."),
        ("actor_train.micro_batch_size=\u00b2", "is not a whole number; use 1 or more."),
        (f"actor_train.micro_batch_size={'9' * 5000}", "is not a whole number; use 1 or more."),
        (f"actor_generate.overcommit={'9' * 5000}", "is not a whole number; use 0 or more."),
        (f"actor_train.pool=0:{'9' * 5000}", "is not a pool; write first:number, such as 0:4, or 0-3."),
        (f"actor_train.layout=tp{'9' * 5000}", "write it like 'tp2,pp1,dp2'"),
        ("actor_train.recompute=ful", "there is no recomputation 'ful'; did you mean 'full'?"),
        ("ref_logprob.recompute=full", "ref_logprob does not train, so nothing is recomputed; remove the pin."),
        ("ref_logprob.generation_slots=4", "ref_logprob does not generate, so it has no generation_slots"),
        ("ref_logprob.offload=weigths", "nothing called 'weigths' can be offloaded; did you mean 'weights'?"),
        ("actor_generate.overcommit=-1", "'-1' is not a whole number; use 0 or more."),
        ("actor_train.layout=tp1,xx2", "the part 'xx2'; write it like 'tp2,pp1,dp2'"),
    ],
)
def test_a_malformed_pin_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(BadInput) as refusal:
        parse_pin(text, PPO_GRAPH)
    assert sentence in str(refusal.value)


def test_one_choice_cannot_be_fixed_twice() -> None:
    with pytest.raises(BadInput, match="fix the same choice; remove one"):
        parse_pins(["actor_train.pool=0:2", "actor_train.pool=2:2"], PPO_GRAPH)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("actor_train", "forbid 'actor_train' is not of the form stage.key=value, such as actor_train.recompute=full."),
        ("actor_train.pool!=0:4", "is not of the form stage.key=value"),
    ],
)
def test_a_malformed_prohibition_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(BadInput) as refusal:
        forbidden(text)
    assert sentence in str(refusal.value)


def test_several_values_can_be_forbidden_and_none_that_is_fixed() -> None:
    texts = ["actor_train.layout!=dp4", "actor_train.layout!=tp4", "actor_train.recompute=none"]
    assert [str(pin) for pin in parse_pins([*texts, texts[0]], PPO_GRAPH)] == [
        "actor_train.layout!=tp1,pp1,dp4",
        "actor_train.layout!=tp4,pp1,dp1",
        "actor_train.recompute=none",
    ]
    with pytest.raises(BadInput, match="exclude each other; remove one"):
        parse_pins(["actor_train.layout=dp4", "actor_train.layout!=dp4"], PPO_GRAPH)


@pytest.mark.parametrize(
    "pin",
    [
        Pin("actor_train", "layout", Layout(tp=2, pp=2, dp=2, sp=True, vpp=2)),
        Pin("actor_train", "pool", Ranks(8, 8), forbids=True),
        Pin("actor_train", "recompute", Recompute.FULL, forbids=True),
        Pin("ref_logprob", "offload", Offload.WEIGHTS),
        Pin("actor_generate", "overcommit", 0),
    ],
    ids=str,
)
def test_what_a_pin_writes_reads_back_as_it(pin: Pin) -> None:
    assert parse_pin(str(pin), PPO_GRAPH) == pin


def test_a_pin_allows_its_value_alone_and_a_prohibition_all_but_its_value() -> None:
    fixed, barred = (
        parse_pin("actor_train.micro_batch_size=4", PPO_GRAPH),
        parse_pin("actor_train.micro_batch_size!=4", PPO_GRAPH),
    )
    assert [fixed.allows(size) for size in (2, 4)] == [False, True]
    assert [barred.allows(size) for size in (2, 4)] == [True, False]
    assert parse_pin(forbidden("actor_train.micro_batch_size=4"), PPO_GRAPH) == barred
    assert (fixed.quoted, barred.quoted) == (
        "pin 'actor_train.micro_batch_size=4'",
        "forbid 'actor_train.micro_batch_size=4'",
    )


def test_one_degree_of_a_layout_can_be_fixed_alone() -> None:
    pin = parse_pin("actor_train.pp = 1", PPO_GRAPH)
    assert str(pin) == "actor_train.pp=1"
    layouts = [Layout(tp=2, pp=2, dp=1), Layout(tp=2, pp=1, dp=2)]
    assert [pin.allows(value_of(layout, Schedule(), pin.key)) for layout in layouts] == [False, True]
    assert value_of(layouts[0], Schedule(micro_batch_size=4), "micro_batch_size") == 4
    with pytest.raises(BadInput, match="'0' is not a whole number; use 1 or more"):
        parse_pin("actor_train.tp=0", PPO_GRAPH)
