"""Prompts: read, encoded and dealt out in an order that only the seed and the step decide."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from meshwright.planner.job import Job
from meshwright.profiles.documents import read_text
from meshwright.profiles.errors import BadInput
from meshwright.profiles.stages import Role
from meshwright.runtime.slots import Prompt
from meshwright.runtime.stopping import StopStrings


@dataclass(frozen=True, kw_only=True)
class PromptData:
    """Encoded prompts of a job, the end token, the strings that end a response too, and the seed."""

    train: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    eos_token: int
    stop: StopStrings | None
    batch_size: int
    seed: int

    def batch(self, step: int) -> tuple[Prompt, ...]:
        """The prompts of a step: shuffled passes over the training prompts, one after another."""
        first = step * self.batch_size
        return tuple(
            Prompt(step=step, row=row, draw=first + row, tokens=self._training_prompt(first + row))
            for row in range(self.batch_size)
        )

    def held_out_batch(self) -> tuple[Prompt, ...]:
        """Every held-out prompt, drawn with the same numbers whenever it is evaluated."""
        return tuple(Prompt(row=row, draw=-1 - row, tokens=tokens) for row, tokens in enumerate(self.held_out))

    def _training_prompt(self, position: int) -> tuple[int, ...]:
        passes, offset = divmod(position, len(self.train))
        return self.train[_order(self.seed, passes, len(self.train))[offset]]


@functools.lru_cache(maxsize=2)
def _order(seed: int, passes: int, count: int) -> tuple[int, ...]:
    """The order in which one pass visits `count` prompts."""
    order = list(range(count))
    random.Random(f"{seed}/{passes}").shuffle(order)
    return tuple(order)


def read_data(job: Job, directory: Path) -> PromptData:
    """The prompts of a job whose relative paths start at `directory`.

    Raises BadInput for a job without data, a missing or malformed file, and a prompt longer than `prompt.max`.
    """
    if job.data is None:
        raise BadInput("job: there is no data section; run needs data.prompts and data.tokenizer.")
    tokenizer = _read_tokenizer(directory / job.data.tokenizer)
    longest = job.workload.prompt.max
    return PromptData(
        train=_read_prompts(directory / job.data.prompts, tokenizer, longest),
        held_out=_read_prompts(directory / job.data.held_out, tokenizer, longest) if job.data.held_out else (),
        eos_token=_eos_token(directory / job.models.source(Role.ACTOR).path),
        stop=StopStrings(tokenizer, job.ppo.stop) if job.ppo.stop else None,
        batch_size=job.workload.batch_size,
        seed=job.ppo.seed,
    )


def _read_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json" if directory.is_dir() else directory
    try:
        return Tokenizer.from_str(read_text(path, "tokenizer"))
    except BadInput:
        raise
    except Exception as error:  # the library raises bare Exception
        raise BadInput(f"tokenizer {path} cannot be read: {error}.") from None


def _read_prompts(path: Path, tokenizer: Tokenizer, longest: int) -> tuple[tuple[int, ...], ...]:
    prompts = []
    for number, line in enumerate(read_text(path, "prompts").splitlines(), start=1):
        try:
            text = json.loads(line)["prompt"]
            tokens = tuple(tokenizer.encode(text).ids)
        except (ValueError, KeyError, TypeError):
            raise BadInput(f'prompts {path} line {number} is not a JSON object with a "prompt" text.') from None
        if not 0 < len(tokens) <= longest:
            raise BadInput(
                f"prompts {path} line {number} has {len(tokens)} tokens, not 1 to {longest}; raise workload.prompt.max."
            )
        prompts.append(tokens)
    if not prompts:
        raise BadInput(f"prompts {path} is empty; give at least one line.")
    return tuple(prompts)


def _eos_token(directory: Path) -> int:
    """The end token of a Hugging Face directory; the first where several are named."""
    config = json.loads(read_text(directory / "config.json", "model config"))
    token = config.get("eos_token_id")
    token = token[0] if isinstance(token, list) and token else token
    if not isinstance(token, int):
        raise BadInput(f"model config {directory / 'config.json'}: eos_token_id is {token!r}; it must be a number.")
    return token
