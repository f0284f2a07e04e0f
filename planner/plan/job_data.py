"""Where the prompts of a job are, and what its columns are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from meshwright.profiles.documents import Document

_PROMPTS = (
    "JSON lines, a .parquet file, or a directory: one that `datasets` saved to disk, or files of a split as its hub has"
)
_COLUMNS = (
    "what the columns are called there: prompt, and any others that are to travel with it; a dot leads into a column "
    "of several parts, as reward_model.ground_truth"
)
_LONG_PROMPTS = "a prompt longer than workload.prompt.max is left out, cut to its last tokens, or the job is refused"
_SPLIT = "split that is read of a directory that has several"
_CHAT = "a prompt that is a text is a user's message: the tokenizer's chat template is laid around it"

PROMPT = "prompt"
"""The column that every row has: a text, messages of a chat, or token ids."""


ANSWER = "answer"
"""A column that a row may have: a text, with which rewards compare a response."""


class Data(Document):
    """Prompts and the tokenizer that reads them; paths are relative to the job file."""

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
        """The names in the files of all columns that are read, by ours."""
        return {PROMPT: PROMPT, **self.columns}

    @property
    def optional_columns(self) -> Mapping[str, str]:
        """Those that rows may have although the job does not name them."""
        return {} if ANSWER in self.columns else {ANSWER: ANSWER}

    @model_serializer(mode="wrap")
    def _without_default(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As it was written before there were other files than JSON lines."""
        defaults = {"columns": {}, "split": "train", "held_out_split": "test", "chat": False}
        return {key: value for key, value in written(self).items() if defaults.get(key, ...) != value}
