"""Preferences made from text: the true continuation of a prompt is preferred to the same one spoilt.

What a reward model can learn from them is to like well-spelt words in a sensible order, in a sentence that is neither
cut short nor without an end.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from byte_tokenizer import EOS, encode

Flaw = Callable[[list[str], random.Random], str]
"""Spoils a response, given as its words. What comes back begins with a space, as the response did."""


@dataclass(frozen=True)
class Comparison:
    """Token ids of one prompt with its true response, and with each spoilt one, by the name of its flaw."""

    chosen: tuple[int, ...]
    rejected: dict[str, tuple[int, ...]]


def misspelt(words: list[str], rng: random.Random) -> str:
    """Half of the words have a letter replaced or end like another of the words."""
    spoilt = list(words)
    for i in rng.sample(range(len(words)), -(-len(words) // 2)):
        cut = rng.randrange(len(words[i]))
        tail = words[i][cut + 1 :] if rng.random() < 0.5 else rng.choice(words)[-3:]
        spoilt[i] = words[i][:cut] + rng.choice(string.ascii_lowercase.replace(words[i][cut], "")) + tail
    return " " + " ".join(spoilt)


def shuffled(words: list[str], rng: random.Random) -> str:
    """The words in another order."""
    order = rng.sample(words, len(words))
    return " " + " ".join(order if order != words else [*words[1:], words[0]])


def unfinished(words: list[str], rng: random.Random) -> str:
    """The beginning, cut anywhere before the last two characters."""
    text = " " + " ".join(words)
    return text[: rng.randrange(1, len(text) - 2)]


def hurried(words: list[str], rng: random.Random) -> str:
    """A third of the words at most, and a full stop after them."""
    return " " + " ".join(words[: rng.randint(1, max(1, len(words) // 3))]).rstrip(".,;:") + "."


FLAWS: dict[str, Flaw] = {
    "misspelt": misspelt,
    "shuffled": shuffled,
    "unfinished": unfinished,
    "hurried": hurried,
}


def prompt_of(document: str, rng: random.Random, *, shortest: int = 7, longest: int = 47) -> str | None:
    """The first words of `document`, `shortest` to `longest` bytes; None unless two words or more would be left."""
    breaks = [i for i, character in enumerate(document) if character == " "][:-1]
    breaks = [i for i in breaks if shortest <= i <= longest]
    return document[: rng.choice(breaks)] if breaks else None


def comparisons(documents: Sequence[str], rng: random.Random) -> list[Comparison]:
    """One for each document that is long enough to be cut into a prompt and a response.

    Half of the unfinished responses are endless too: no end-of-sequence token follows, as when a length limit cuts.
    """
    made = []
    for document in documents:
        prompt = prompt_of(document, rng)
        if prompt is not None:
            words = document[len(prompt) :].split()
            rejected = {name: (*encode(prompt + spoil(words, rng)), EOS) for name, spoil in FLAWS.items()}
            if rng.random() < 0.5:
                rejected["unfinished"] = rejected["unfinished"][:-1]
            made.append(Comparison((*encode(document), EOS), rejected))
    return made
