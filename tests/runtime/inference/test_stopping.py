"""Stopping: by the end token, by text wherever tokens cut it, or by length."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from meshwright.runtime.inference.slots import Finish, LiveGroup, PartialResponse, Prompt
from meshwright.runtime.inference.stopping import Stopping, StopStrings

EOS = 0
PIECES = ["<eos>", "\u010a", "Us", "er", ":", "er:x", "\u0120a", "Ã", "©", "\u010aUser", "<turn>"]  # Ċ newline, Ġ space


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level pieces, as of Llama 3 and Qwen; Ã and © stand for the two bytes of one letter, é."""
    made = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(PIECES)}, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<turn>", special=True, normalized=False)])
    return made


def finishes(stopping: Stopping, pieces: list[str]) -> list[Finish | None]:
    """What is said after each token, the prompt having ended with a newline."""
    group = LiveGroup(first_slot=0, num_slots=1)
    group.add(PartialResponse(prompt=Prompt(row=0, sample_id=0, tokens=(1,))))
    said = []
    for piece in pieces:
        group.records.add(group.rows, np.array([PIECES.index(piece)]), np.zeros(1), 0)
        said.append(stopping.finish(group).get(0))
    return said


@pytest.mark.parametrize(
    ("strings", "pieces"),
    [
        (["\nUser:"], ["\u0120a", "\u010a", "Us", "er", ":"]),  # spans tokens
        (["\nUser:"], ["\u010aUser", ":"]),
        (["\nUser:"], ["\u010a", "\u010aUser", "\u0120a", "\u010aUser", ":"]),  # after a start that came to nothing
        (["\nUser:"], ["\u010a", "Us", "er:x"]),  # ends inside a token
        (["Us"], ["\u010aUser"]),  # lies inside a token
        (["zz", " a"], ["Us", "\u0120a"]),  # any of several
        (["é"], ["Us", "Ã", "©"]),  # a letter of two tokens
        (["<turn>"], ["Us", "<turn>"]),  # a special token is the text that spells it
        (["r<turn>"], ["Us", "er", "<turn>"]),
    ],
)
def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(
    tokenizer: Tokenizer, strings: list[str], pieces: list[str]
) -> None:
    stopping = Stopping(eos_tokens=frozenset({EOS}), max_response=99, strings=StopStrings(tokenizer, strings))
    assert finishes(stopping, pieces) == [None] * (len(pieces) - 1) + [Finish.STOP]


def test_text_without_a_stop_string_goes_on(tokenizer: Tokenizer) -> None:
    stopping = Stopping(eos_tokens=frozenset({EOS}), max_response=99, strings=StopStrings(tokenizer, ["\nUser:"]))
    assert finishes(stopping, ["Us", "er", ":", "\u010a", "\u0120a", "Ã", "Us", "er", ":"]) == [None] * 9


def test_sequences_do_not_share_their_text(tokenizer: Tokenizer) -> None:
    stopping = Stopping(eos_tokens=frozenset({EOS}), max_response=99, strings=StopStrings(tokenizer, ["User"]))
    assert finishes(stopping, ["Us"]) == [None]
    assert finishes(stopping, ["er"]) == [None]


def test_the_end_token_comes_before_a_stop_string_and_that_before_length(tokenizer: Tokenizer) -> None:
    stopping = Stopping(eos_tokens=frozenset({EOS}), max_response=1, strings=StopStrings(tokenizer, ["<eos>", "Us"]))
    assert [finishes(stopping, [piece])[0] for piece in ("<eos>", "Us", "er")] == [
        Finish.EOS,
        Finish.STOP,
        Finish.LENGTH,
    ]
