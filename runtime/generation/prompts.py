"""Prompts: read, encoded and dealt out in an order that only the seed and the step decide."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from meshwright.planner.plan.job import Job
from meshwright.profiles.documents import read_text
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import Role
from meshwright.runtime.generation.slots import Prompt
from meshwright.runtime.generation.stopping import StopStrings
from meshwright.runtime.model.end_tokens import ResponseEnds, read_end_tokens


@dataclass(frozen=True, kw_only=True)
class PromptData:
    """Encoded prompts of a job, what ends a response to them, and the seed."""

    train: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    ends: ResponseEnds
    stop: StopStrings | None
    batch_size: int
    seed: int
    num_tokens: int
    """Ids that the tokenizer knows: what may be drawn. Rows of a vocabulary behind them only pad it."""
    group_size: int = 1
    """Sequences of each prompt of a training batch."""
    notes: tuple[str, ...] = ()
    """What was done about prompts that are too long."""
    answers: tuple[str | None, ...] = ()
    """Of each training prompt, for rewards that compare a response with it."""
    held_out_answers: tuple[str | None, ...] = ()
    tokenizer: Tokenizer | None = None

    def batch(self, step: int) -> tuple[Prompt, ...]:
        """The prompts of a step, each as often as a group has samples, with a draw of its own: shuffled passes over the
        training prompts, one after another."""
        first, size = step * self.batch_size, self.group_size
        return tuple(
            Prompt(step=step, row=row, draw=first + row, tokens=self._training_prompt((first + row) // size))
            for row in range(self.batch_size)
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the encoded training prompts, in their order."""
        return _digest(self.train)

    @property
    def held_out_digest(self) -> str:
        """SHA-256 of the encoded held-out prompts, in their order."""
        return _digest(self.held_out)

    def held_out_batch(self) -> tuple[Prompt, ...]:
        """Every held-out prompt, drawn with the same numbers whenever it is evaluated."""
        return tuple(Prompt(row=row, draw=-1 - row, tokens=tokens) for row, tokens in enumerate(self.held_out))

    @property
    def has_answers(self) -> bool:
        """Whether every prompt has one."""
        return None not in (*self.answers, *self.held_out_answers)

    def answer(self, prompt: Prompt) -> str | None:
        """That of a prompt of `batch` or `held_out_batch`."""
        if prompt.draw < 0:
            return self.held_out_answers[-1 - prompt.draw]
        return self.answers[self._index(prompt.draw // self.group_size)]

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens spell, without special ones."""
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _training_prompt(self, position: int) -> tuple[int, ...]:
        return self.train[self._index(position)]

    def _index(self, position: int) -> int:
        """The place among the training prompts of the one at a position of the run."""
        passes, offset = divmod(position, len(self.train))
        return _order(self.seed, passes, len(self.train))[offset]


def _digest(prompts: tuple[tuple[int, ...], ...]) -> str:
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


@functools.lru_cache(maxsize=2)
def _order(seed: int, passes: int, count: int) -> tuple[int, ...]:
    """The order in which one pass visits `count` prompts."""
    order = list(range(count))
    random.Random(f"{seed}/{passes}").shuffle(order)
    return tuple(order)


def read_data(job: Job, directory: Path) -> PromptData:
    """The prompts of a job whose relative paths start at `directory`.

    Raises BadInput for a job without data, a missing or malformed file, a prompt longer than `prompt.max` where the job
    refuses such, and an actor that names no end token.
    """
    if job.data is None:
        raise BadInput("job: there is no data section; run needs data.prompts and data.tokenizer.")
    tokenizer = _read_tokenizer(directory / job.data.tokenizer)
    files = {"train": job.data.prompts, **({"held_out": job.data.held_out} if job.data.held_out else {})}
    read = {name: _read_prompts(directory / file, tokenizer, job) for name, file in files.items()}
    return PromptData(
        train=read["train"].prompts,
        held_out=read["held_out"].prompts if "held_out" in read else (),
        answers=read["train"].answers,
        held_out_answers=read["held_out"].answers if "held_out" in read else (),
        tokenizer=tokenizer,
        notes=tuple(part.note for part in read.values() if part.note),
        ends=ResponseEnds(
            tokens=read_end_tokens(directory / job.models.source(Role.ACTOR).path, tokenizer), strings=job.settings.stop
        ),
        stop=StopStrings(tokenizer, job.settings.stop) if job.settings.stop else None,
        batch_size=job.workload.batch_size,
        group_size=job.workload.group_size,
        seed=job.settings.seed,
        num_tokens=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
    )


def _read_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json" if directory.is_dir() else directory
    try:
        return Tokenizer.from_str(read_text(path, "tokenizer"))
    except BadInput:
        raise
    except Exception as error:  # the library raises bare Exception
        raise BadInput(f"tokenizer {path} cannot be read: {error}.") from None


@dataclass(frozen=True)
class _Read:
    """The encoded prompts of a file with their answers, and what was done about those that are too long; empty where
    none is."""

    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[str | None, ...]
    note: str


def _read_prompts(path: Path, tokenizer: Tokenizer, job: Job) -> _Read:
    """Those longer than `prompt.max` are dealt with as the job says; of one that is cut the last tokens stay."""
    assert job.data is not None
    longest, how = job.workload.prompt.max, job.data.long_prompts
    prompts, answers, num_long = [], [], 0
    for number, line in enumerate(read_text(path, "prompts").splitlines(), start=1):
        tokens, answer = _encoded(path, number, line, tokenizer)
        if len(tokens) > longest:
            num_long += 1
            if how == "refuse":
                raise BadInput(
                    f"prompts {path} line {number} has {len(tokens)} tokens, more than workload.prompt.max={longest}; "
                    "raise that, or give data.long_prompts: filter or cut."
                )
            if how == "filter":
                continue
        prompts.append(tokens[-longest:])
        answers.append(answer)
    if not prompts:
        left_out = f" but for {num_long} prompts of more than workload.prompt.max={longest} tokens" if num_long else ""
        raise BadInput(f"prompts {path} is empty{left_out}; give at least one line.")
    done = {"filter": "left out", "cut": f"cut to their last {longest}"}.get(how)
    note = (
        f"{path}: {num_long} of {num_long * (how == 'filter') + len(prompts)} prompts have more than {longest} tokens"
    )
    return _Read(tuple(prompts), tuple(answers), f"{note} and were {done}" if num_long else "")


def _encoded(path: Path, number: int, line: str, tokenizer: Tokenizer) -> tuple[tuple[int, ...], str | None]:
    """The tokens of a line's prompt, and its answer if it has one."""
    try:
        told = json.loads(line)
        tokens, answer = tuple(tokenizer.encode(told["prompt"]).ids), told.get("answer")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f'prompts {path} line {number} is not a JSON object with a "prompt" text.') from None
    if not tokens:
        raise BadInput(f"prompts {path} line {number} has no tokens; give it a text, or take the line out.")
    if answer is not None and not isinstance(answer, str):
        raise BadInput(f"prompts {path} line {number} has an answer that is no text; write it in quotes.")
    return tokens, answer
