"""Where the engines are that `run` starts beside a rank. Planning needs none of it."""

from __future__ import annotations

from pydantic import Field

from meshwright.profiles.documents import Document
from meshwright.profiles.frameworks import SGLANG, VLLM, EngineName


class EngineEnvironment(Document):
    """The environment of one engine."""

    python: str = Field(description="the interpreter of the environment that has the engine, relative to the job file")


class EngineEnvironments(Document):
    """The environments of the engines that run in processes of their own."""

    vllm: EngineEnvironment | None = Field(default=None, description="vLLM")
    sglang: EngineEnvironment | None = Field(default=None, description="SGLang, with which meshwright has never run")

    @property
    def named(self) -> tuple[EngineName, ...]:
        """The engines whose environments the job names."""
        return tuple(name for name in (VLLM, SGLANG) if self.of(name))

    def of(self, engine: EngineName) -> EngineEnvironment | None:
        """Return the environment of an engine; None where the job names none."""
        return {VLLM: self.vllm, SGLANG: self.sglang}.get(engine)
