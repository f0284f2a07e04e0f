"""Prompts of a job: read, encoded and ordered into batches by the seed and the step alone."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from meshwright.planner.job.evaluation import HELD_OUT, Evaluation, prompts_key
from meshwright.planner.job.generated_verdicts import JudgeSpec
from meshwright.planner.job.job import Job
from meshwright.planner.job.sections import ANSWER, PROMPT
from meshwright.profiles.errors import BadInput, RunFailed
from meshwright.profiles.stages import Role
from meshwright.profiles.untrusted_text import read_text
from meshwright.runtime.inference.slots import Prompt
from meshwright.runtime.inference.stopping import StopStrings
from meshwright.runtime.model.end_tokens import StopConditions, read_end_tokens
from meshwright.runtime.rollout.prompt_encoding import MAX_CHARACTERS, PromptEncoder, encode_text, load_with_settings
from meshwright.runtime.rollout.prompt_files import read_rows

_TOKENIZER_CONFIG = "tokenizer_config.json"


_STRIDE = 2**32
"""Distance between the first sample ids of two held-out sets, so that a set keeps its ids when others grow."""


@dataclass(frozen=True)
class PromptSet:
    """The encoded prompts of a file or directory, with what is beside each of them."""

    prompts: tuple[tuple[int, ...], ...] = ()
    columns: tuple[Mapping[str, Any], ...] = ()
    """The columns that the job names besides the prompt, by name, for each prompt."""
    messages: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """The messages of each prompt that is a chat, kept where rewards read them; empty otherwise."""
    note: str = ""
    """A sentence on the treatment of prompts that are too long; empty if there are none."""
    max_response: int | None = None
    """Maximum number of tokens after a prompt of a held-out set; None: as in training."""

    @property
    def digest(self) -> str:
        """SHA-256 of the encoded prompts, in their order."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()

    @property
    def has_answers(self) -> bool:
        """True if every prompt has an answer."""
        return all(ANSWER in columns for columns in self.columns)


@dataclass(frozen=True, kw_only=True)
class PromptData:
    """The encoded prompts of a job, the end tokens and stop strings of a response (`ends`; `stop` finds the strings in
    sampled text), and the seed."""

    train: tuple[tuple[int, ...], ...]
    held_out: Mapping[str, PromptSet] = field(default_factory=dict)
    """The sets of held-out prompts, by name: first that of `data.held_out`, then those of `evaluation.sets`."""
    ends: StopConditions
    stop: StopStrings | None
    batch_size: int
    seed: int
    num_tokens: int
    """Number of token ids that the tokenizer knows, which are the ones that may be sampled. Later rows of a vocabulary
    are padding."""
    group_size: int = 1
    """Samples of each prompt of a training batch."""
    notes: tuple[str, ...] = ()
    """Sentences that report what was done with prompts that are too long."""
    reassigned: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Sample ids, by step, of batches that differ from those of the seed's order, because a run was resumed under
    another plan."""
    num_wave_prompts: int = 0
    """Number of prompts that waves of dynamic sampling had used before this run started or was resumed."""
    train_columns: tuple[Mapping[str, Any], ...] = ()
    """The columns that the job names besides the prompt, by name, for each training prompt."""
    train_messages: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """The messages of each training prompt that is a chat, kept for a job with rewards; empty for a job without."""
    tokenizer: Tokenizer | None = None

    def batch(self, step: int) -> tuple[Prompt, ...]:
        """Return the prompts of a step, each repeated for every sample of its group, with a sample id of its own.
        Batches are consecutive slices of shuffled passes over the training prompts."""
        first, size = step * self.batch_size, self.group_size
        sample_ids = self.reassigned.get(step, range(first, first + self.batch_size))
        return tuple(
            Prompt(step=step, row=row, sample_id=sample_id, tokens=self._training_prompt(sample_id // size))
            for row, sample_id in enumerate(sample_ids)
        )

    def wave(self, step: int, rows: range, num_wave_prompts: int) -> tuple[Prompt, ...]:
        """Return the prompts of a wave of a step, in these rows, each repeated for every sample of its group. Earlier
        waves have used the first `num_wave_prompts` prompts of the shuffled passes, whether their groups were kept or
        not."""
        size = self.group_size
        return tuple(
            Prompt(step=step, row=row, sample_id=sample_id, tokens=self._training_prompt(sample_id // size))
            for sample_id, row in enumerate(rows, start=num_wave_prompts * size)
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the encoded training prompts, in their order."""
        return PromptSet(self.train).digest

    def held_out_batch(self, name: str = HELD_OUT) -> tuple[Prompt, ...]:
        """Return every prompt of a held-out set; each evaluation samples it with the same random numbers."""
        one, first = self.held_out[name], -1 - list(self.held_out).index(name) * _STRIDE
        return tuple(
            Prompt(row=row, sample_id=first - row, tokens=tokens, max_response=one.max_response)
            for row, tokens in enumerate(one.prompts)
        )

    def held_out_name(self, sample_id: int) -> str:
        """Return the name of the set of a held-out prompt, which has a negative sample id."""
        return list(self.held_out)[(-1 - sample_id) // _STRIDE]

    def columns_of(self, sample_id: int) -> Mapping[str, Any]:
        """Return the columns that the job names beside the prompt, for the prompt with this sample id."""
        if sample_id < 0:
            return self.held_out[self.held_out_name(sample_id)].columns[(-1 - sample_id) % _STRIDE]
        return self.train_columns[self._training_index(sample_id // self.group_size)]

    def without_answers(self, evaluation: Evaluation) -> tuple[str, ...]:
        """Return the keys of the job for the prompts that its own rewards score and that do not all have an answer."""
        scored = {"data.prompts": PromptSet(columns=self.train_columns)} | {
            prompts_key(name): one for name, one in self.held_out.items() if not evaluation.own_rewards(name)
        }
        return tuple(key for key, one in scored.items() if not one.has_answers)

    def answer(self, prompt: Prompt) -> str | None:
        """Return the answer of a prompt of `batch` or `held_out_batch` as a text."""
        answer = self.columns_of(prompt.sample_id).get(ANSWER)
        return None if answer is None else str(answer)

    def messages(self, prompt: Prompt) -> tuple[Mapping[str, Any], ...]:
        """Return the messages of a prompt of `batch` or `held_out_batch` that is a chat; none for other prompts."""
        if prompt.sample_id < 0:
            messages = self.held_out[self.held_out_name(prompt.sample_id)].messages
            return messages[prompt.row] if messages else ()
        index = self._training_index(prompt.sample_id // self.group_size)
        return self.train_messages[index] if self.train_messages else ()

    def text(self, tokens: Sequence[int]) -> str:
        """Decode tokens, without special ones."""
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode a text that is inserted between others, without special tokens before or after it. A text that is
        longer than any response is truncated. Raises RunFailed if the tokenizer fails."""
        assert self.tokenizer is not None
        try:
            return tuple(encode_text(self.tokenizer, text[:MAX_CHARACTERS], "the answer of a tool", special=False).ids)
        except BadInput as error:
            raise RunFailed(str(error)) from None

    def _training_prompt(self, position: int) -> tuple[int, ...]:
        return self.train[self._training_index(position)]

    def _training_index(self, position: int) -> int:
        """Return the index, among the training prompts, of the one at a position in the concatenated passes."""
        pass_number, offset = divmod(position, len(self.train))
        return _order(self.seed, pass_number, len(self.train))[offset]


def judge_template(judge: JudgeSpec, data: PromptData) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that a judge reads before and after a sequence.

    Raises BadInput without a tokenizer, and for texts of more tokens than the job says.
    """
    if data.tokenizer is None:
        raise BadInput("job: a judge reads and writes text, and data.tokenizer names no tokenizer; name one.")
    before, after = data.encode(judge.before), data.encode(judge.after)
    if (found := len(before) + len(after)) > judge.template_tokens:
        raise BadInput(
            f"job: the texts of the judge have {found} tokens, and template_tokens={judge.template_tokens} is planned "
            f"for; set it to {found} and plan again."
        )
    return before, after


@functools.lru_cache(maxsize=2)
def _order(seed: int, pass_number: int, count: int) -> tuple[int, ...]:
    """Return the order in which one pass visits `count` prompts."""
    order = list(range(count))
    random.Random(f"{seed}/{pass_number}").shuffle(order)
    return tuple(order)


def read_data(job: Job, directory: Path) -> PromptData:
    """Read the prompts of a job whose relative paths start at `directory`.

    Raises BadInput for a job without data, a missing or malformed file or row, messages without a chat template, a
    prompt longer than `prompt.max` if the job refuses such, and an actor that names no end token.
    """
    if job.data is None:
        raise BadInput("job: there is no data section; run needs data.prompts and data.tokenizer.")
    data, tokenizer_path = job.data, directory / job.data.tokenizer
    tokenizer = read_tokenizer(tokenizer_path)
    encoder = PromptEncoder(tokenizer, tokenizer_path, chat=data.chat)
    train = _read_prompts(directory / data.prompts, data.split, encoder, job, keeps_messages=bool(job.rewards))
    held_out: dict[str, PromptSet] = {}
    sources = {HELD_OUT: (data.held_out, data.held_out_split)} if data.held_out else {}
    sources |= {name: (one.prompts, one.split) for name, one in job.evaluation.sets.items()}
    for name, (path, split) in sources.items():
        is_scored = bool(job.evaluation.own_rewards(name) or job.rewards)
        of_set = _read_prompts(directory / path, split, encoder, job, keeps_messages=is_scored)
        longest = job.evaluation.sets[name].max_response if name in job.evaluation.sets else None
        held_out[name] = replace(of_set, max_response=longest)
    return PromptData(
        train=train.prompts,
        held_out=held_out,
        train_columns=train.columns,
        train_messages=train.messages,
        notes=tuple(one.note for one in (train, *held_out.values()) if one.note),
        tokenizer=tokenizer,
        ends=StopConditions(
            tokens=read_end_tokens(directory / job.models.source(Role.ACTOR).path, tokenizer), strings=job.settings.stop
        ),
        stop=StopStrings(tokenizer, job.settings.stop) if job.settings.stop else None,
        batch_size=job.workload.batch_size,
        group_size=job.workload.candidates.group_size,
        seed=job.settings.seed,
        num_tokens=encoder.num_ids,
    )


def read_tokenizer(directory: Path) -> Tokenizer:
    """Read the tokenizer of a directory, or of a tokenizer.json alone, as transformers does: its tokenizer_config.json
    applies. It neither truncates nor pads, whatever the file says. Raises BadInput if it cannot be read."""
    path = directory / "tokenizer.json" if directory.is_dir() else directory
    try:
        tokenizer = Tokenizer.from_str(read_text(path, "tokenizer"))
    except BadInput:
        raise
    except Exception as error:  # the library raises bare Exception
        raise BadInput(f"tokenizer {path} cannot be read: {error}.") from None
    if directory.is_dir() and (directory / _TOKENIZER_CONFIG).exists():
        tokenizer = _as_configured(tokenizer, directory)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _as_configured(stored: Tokenizer, directory: Path) -> Tokenizer:
    """Return the tokenizer that transformers makes of a tokenizer.json with the settings beside it, such as the special
    tokens it adds."""
    configured = load_with_settings(directory, f"with its {_TOKENIZER_CONFIG}")
    tokenizer: Tokenizer = configured.backend_tokenizer
    tokenizer.encode_special_tokens = bool(getattr(configured, "split_special_tokens", False))
    added = tokenizer.get_vocab(with_added_tokens=True).keys() - stored.get_vocab(with_added_tokens=True).keys()
    if added:
        raise BadInput(
            f"tokenizer {directory}: {_TOKENIZER_CONFIG} adds {', '.join(map(repr, sorted(added)[:3]))}, which "
            "tokenizer.json lacks, so the models have no embedding row for it; save the tokenizer with transformers "
            "again."
        )
    return tokenizer


def _read_prompts(path: Path, split: str, encoder: PromptEncoder, job: Job, *, keeps_messages: bool) -> PromptSet:
    """Read the prompts of a file. One longer than `prompt.max` is treated as the job says; a truncated one keeps its
    last tokens."""
    assert job.data is not None
    longest, policy = job.workload.prompt.max, job.data.long_prompts
    prompts: list[tuple[int, ...]] = []
    columns: list[Mapping[str, Any]] = []
    messages: list[tuple[Mapping[str, Any], ...]] = []
    num_long = 0
    for row in read_rows(path, job.data.named_columns, split, job.data.optional_columns):
        tokens = encoder.encode(row.values[PROMPT], row.place)
        if len(tokens) > longest:
            num_long += 1
            if policy == "refuse":
                raise BadInput(
                    f"{row.place} has {len(tokens)} tokens, more than workload.prompt.max={longest}; raise that, or "
                    "give data.long_prompts: filter or truncate_left."
                )
            if policy == "filter":
                continue
        prompts.append(tokens[-longest:])
        if not isinstance(row.values.get(ANSWER, ""), str | int | float):
            raise BadInput(f"{row.place} has an answer that is neither a text nor a number; write one.")
        columns.append({name: value for name, value in row.values.items() if name != PROMPT})
        if keeps_messages:
            messages.append(encoder.messages(row.values[PROMPT], row.place))
    if not prompts:
        filtered = f" but for {num_long} prompts of more than workload.prompt.max={longest} tokens" if num_long else ""
        raise BadInput(f"prompts {path} is empty{filtered}; give at least one line.")
    done = {"filter": "left out", "truncate_left": f"truncated to their last {longest}"}.get(policy)
    note = (
        f"{path}: {num_long} of {num_long * (policy == 'filter') + len(prompts)} prompts have more than {longest} "
        "tokens"
    )
    return PromptSet(tuple(prompts), tuple(columns), tuple(messages), f"{note} and were {done}" if num_long else "")
