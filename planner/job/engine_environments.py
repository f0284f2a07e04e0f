"""Where the engines are that `run` starts beside a rank. Planning needs none of it."""

from __future__ import annotations

from pydantic import Field

from meshwright.profiles.documents import Document
from meshwright.profiles.frameworks import VLLM, EngineName


class EngineEnvironment(Document):
    """The environment of one engine."""

    python: str = Field(description="the interpreter of the environment that has the engine, relative to the job file")


class EngineEnvironments(Document):
    """The environments of the engines that run in processes of their own."""

    vllm: EngineEnvironment | None = Field(default=None, description="vLLM")

    @property
    def named(self) -> tuple[EngineName, ...]:
        """The engines whose environments the job names."""
        return (VLLM,) if self.vllm else ()
