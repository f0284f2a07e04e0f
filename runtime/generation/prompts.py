"""Prompts: read, encoded and dealt out in an order that only the seed and the step decide."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from meshwright.planner.plan.job import Job
from meshwright.planner.plan.job_data import ANSWER, PROMPT
from meshwright.profiles.documents import read_text
from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.profiles.stages import Role
from meshwright.runtime.generation.prompt_files import read_rows
from meshwright.runtime.generation.prompt_tokens import MOST_CHARACTERS, Encoder, encoded, load_with_settings
from meshwright.runtime.generation.slots import Prompt
from meshwright.runtime.generation.stopping import StopStrings
from meshwright.runtime.model.end_tokens import ResponseEnds, read_end_tokens

_TOKENIZER_CONFIG = "tokenizer_config.json"


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
    """Sequences that are drawn of each prompt of a training batch."""
    notes: tuple[str, ...] = ()
    """What was done about prompts that are too long."""
    dealt_again: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By step, the draws of batches that are not as the seed deals them: a resume has put others there."""
    num_dealt: int = 0
    """Prompts that waves were dealt before this run began or went on."""
    train_columns: tuple[Mapping[str, Any], ...] = ()
    held_out_columns: tuple[Mapping[str, Any], ...] = ()
    """The other columns of the job by their names, of each prompt that is there."""
    tokenizer: Tokenizer | None = None

    def batch(self, step: int) -> tuple[Prompt, ...]:
        """The prompts of a step, each as often as a group has samples, with a draw of its own: shuffled passes over the
        training prompts, one after another."""
        first, size = step * self.batch_size, self.group_size
        draws = self.dealt_again.get(step, range(first, first + self.batch_size))
        return tuple(
            Prompt(step=step, row=row, draw=draw, tokens=self._training_prompt(draw // size))
            for row, draw in enumerate(draws)
        )

    def wave(self, step: int, rows: range, num_dealt: int) -> tuple[Prompt, ...]:
        """The prompts of a wave of a step, in these rows: those behind the first `num_dealt` of the passes, whatever
        the steps before have used of them, each as often as a group has samples."""
        size = self.group_size
        return tuple(
            Prompt(step=step, row=row, draw=draw, tokens=self._training_prompt(draw // size))
            for draw, row in enumerate(rows, start=num_dealt * size)
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

    def columns_of(self, draw: int) -> Mapping[str, Any]:
        """What travels with a prompt, by its `draw`: the columns that the job names beside the prompt's own."""
        if draw < 0:
            return self.held_out_columns[-1 - draw]
        return self.train_columns[self._place(draw // self.group_size)]

    @property
    def has_answers(self) -> bool:
        """Whether every prompt has one."""
        return all(ANSWER in columns for columns in (*self.train_columns, *self.held_out_columns))

    def answer(self, prompt: Prompt) -> str | None:
        """That of a prompt of `batch` or `held_out_batch`, as a text."""
        found = self.columns_of(prompt.draw).get(ANSWER)
        return None if found is None else str(found)

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens spell, without special ones."""
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text that stands among others: with nothing in front of it and nothing behind. Of one that is
        longer than any response those of its beginning. Raises RunFailed where the tokenizer fails."""
        assert self.tokenizer is not None
        try:
            return tuple(encoded(self.tokenizer, text[:MOST_CHARACTERS], "the answer of a tool", special=False).ids)
        except BadInput as error:
            raise RunFailed(str(error)) from None

    def _training_prompt(self, position: int) -> tuple[int, ...]:
        return self.train[self._place(position)]

    def _place(self, position: int) -> int:
        """Among the training prompts, of the one at a position in all passes."""
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

    Raises BadInput for a job without data, a missing or malformed file or row, messages without a chat template, a
    prompt longer than `prompt.max` where the job refuses such, and an actor that names no end token.
    """
    if job.data is None:
        raise BadInput("job: there is no data section; run needs data.prompts and data.tokenizer.")
    data, place = job.data, directory / job.data.tokenizer
    tokenizer = read_tokenizer(place)
    encoder = Encoder(tokenizer, place, chat=data.chat)
    train = _read_prompts(directory / data.prompts, data.split, encoder, job)
    held_out = _Read()
    if data.held_out:
        held_out = _read_prompts(directory / data.held_out, data.held_out_split, encoder, job)
    return PromptData(
        train=train.prompts,
        held_out=held_out.prompts,
        train_columns=train.columns,
        held_out_columns=held_out.columns,
        notes=tuple(part.note for part in (train, held_out) if part.note),
        tokenizer=tokenizer,
        ends=ResponseEnds(
            tokens=read_end_tokens(directory / job.models.source(Role.ACTOR).path, tokenizer), strings=job.settings.stop
        ),
        stop=StopStrings(tokenizer, job.settings.stop) if job.settings.stop else None,
        batch_size=job.workload.batch_size,
        group_size=job.workload.candidates.group_size,
        seed=job.settings.seed,
        num_tokens=encoder.num_ids,
    )


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a directory, or of a tokenizer.json alone, as transformers reads it: its tokenizer_config.json
    counts, and it neither cuts nor pads, whatever the file says. Raises BadInput where it cannot be read."""
    path = directory / "tokenizer.json" if directory.is_dir() else directory
    try:
        found = Tokenizer.from_str(read_text(path, "tokenizer"))
    except BadInput:
        raise
    except Exception as error:  # the library raises bare Exception
        raise BadInput(f"tokenizer {path} cannot be read: {error}.") from None
    if directory.is_dir() and (directory / _TOKENIZER_CONFIG).exists():
        found = _as_configured(found, directory)
    found.no_truncation()
    found.no_padding()
    return found


def _as_configured(stored: Tokenizer, directory: Path) -> Tokenizer:
    """What transformers makes of a tokenizer.json by the settings beside it, such as which special tokens it adds."""
    whole = load_with_settings(directory, f"with its {_TOKENIZER_CONFIG}")
    found: Tokenizer = whole.backend_tokenizer
    found.encode_special_tokens = bool(getattr(whole, "split_special_tokens", False))
    added = found.get_vocab(with_added_tokens=True).keys() - stored.get_vocab(with_added_tokens=True).keys()
    if added:
        raise BadInput(
            f"tokenizer {directory}: {_TOKENIZER_CONFIG} adds {', '.join(map(repr, sorted(added)[:3]))}, which "
            "tokenizer.json has not, so that the models have no row for it; save the tokenizer with transformers again."
        )
    return found


@dataclass(frozen=True)
class _Read:
    """The encoded prompts of a file, the columns beside them, and what was done about those that are too long; empty
    where none is."""

    prompts: tuple[tuple[int, ...], ...] = ()
    columns: tuple[Mapping[str, Any], ...] = ()
    note: str = ""


def _read_prompts(path: Path, split: str, encoder: Encoder, job: Job) -> _Read:
    """Those longer than `prompt.max` are dealt with as the job says; of one that is cut the last tokens stay."""
    assert job.data is not None
    longest, how = job.workload.prompt.max, job.data.long_prompts
    prompts: list[tuple[int, ...]] = []
    columns: list[Mapping[str, Any]] = []
    num_long = 0
    for row in read_rows(path, job.data.named_columns, split, job.data.optional_columns):
        tokens = encoder.encode(row.values[PROMPT], row.place)
        if len(tokens) > longest:
            num_long += 1
            if how == "refuse":
                raise BadInput(
                    f"{row.place} has {len(tokens)} tokens, more than workload.prompt.max={longest}; raise that, or "
                    "give data.long_prompts: filter or cut."
                )
            if how == "filter":
                continue
        prompts.append(tokens[-longest:])
        if not isinstance(row.values.get(ANSWER, ""), str | int | float):
            raise BadInput(f"{row.place} has an answer that is neither a text nor a number; write one.")
        columns.append({name: value for name, value in row.values.items() if name != PROMPT})
    if not prompts:
        left_out = f" but for {num_long} prompts of more than workload.prompt.max={longest} tokens" if num_long else ""
        raise BadInput(f"prompts {path} is empty{left_out}; give at least one line.")
    done = {"filter": "left out", "cut": f"cut to their last {longest}"}.get(how)
    note = (
        f"{path}: {num_long} of {num_long * (how == 'filter') + len(prompts)} prompts have more than {longest} tokens"
    )
    return _Read(tuple(prompts), tuple(columns), f"{note} and were {done}" if num_long else "")
