"""The data of a job: its prompts, the names of their columns, and the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from meshwright.profiles.documents import Document

_PROMPTS = (
    "JSON lines, a .parquet file, or a directory: one saved by `datasets`, or the files of a split as on the "
    "Hugging Face hub"
)
_COLUMNS = (
    "names of the columns in the files: prompt, and any others to pass on with it; a dot selects a field of a nested "
    "column, as reward_model.ground_truth"
)
_LONG_PROMPTS = (
    "prompts longer than workload.prompt.max are left out (filter), cut to their last tokens (cut), or the job is "
    "refused"
)
_SPLIT = "split to read from a directory that has several"
_CHAT = "treat a text prompt as a user message and apply the tokenizer's chat template"

PROMPT = "prompt"
"""The column that every row has: a text, messages of a chat, or token ids."""


ANSWER = "answer"
"""A column that a row may have: a text with which rewards compare a response."""


class Data(Document):
    """The prompts of a job and their tokenizer; paths are relative to the job file."""

    prompts: str = Field(description=_PROMPTS)
    held_out: str | None = Field(default=None, description="file of held-out prompts, for evaluations")
    tokenizer: str = Field(description="tokenizer.json, or the directory that has it")
    long_prompts: Literal["filter", "cut", "refuse"] = Field(default="filter", description=_LONG_PROMPTS)
    columns: Mapping[str, str] = Field(default={}, description=_COLUMNS)
    split: str = Field(default="train", description=_SPLIT)
    held_out_split: str = Field(default="test", description=_SPLIT)
    chat: bool = Field(default=False, description=_CHAT)

    @property
    def named_columns(self) -> Mapping[str, str]:
        """The names in the files of all columns that are read, by our name of the column."""
        return {PROMPT: PROMPT, **self.columns}

    @property
    def optional_columns(self) -> Mapping[str, str]:
        """Columns that rows may have although the job does not name them, likewise."""
        return {} if ANSWER in self.columns else {ANSWER: ANSWER}

    @model_serializer(mode="wrap")
    def _without_default(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out defaults."""
        defaults = {"columns": {}, "split": "train", "held_out_split": "test", "chat": False}
        return {key: value for key, value in written(self).items() if defaults.get(key, ...) != value}
