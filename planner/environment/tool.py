"""The tool of a job with multi-turn rollouts: a function in worker processes of the host, like rewards."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from meshwright.planner.environment.rewards import is_function_path
from meshwright.profiles.documents import Document

BUILT_IN_TOOLS = ("calculator",)
"""Built-in tools, which every job may name; see `runtime.environment`."""

_TOOL_FUNCTION = f"{', '.join(BUILT_IN_TOOLS)}, or module:function of a module that run is allowed to load"
_CALL_END = "the text that ends a call: a turn that completes it is answered by the tool, any other ends the rollout"
_TOOL_WORKERS = "concurrent calls for each replica of the generation"
_TOOL_FAILURE = "answer if the function failed or timed out; the run ends if not given"


class Tool(Document):
    """A tool that answers turns of a rollout; the next turn continues after its answer."""

    function: str = Field(description=_TOOL_FUNCTION)
    call_end: str = Field(default=">>", min_length=1, max_length=40, description=_CALL_END)
    workers: int = Field(default=4, gt=0, le=1024, description=_TOOL_WORKERS)
    timeout_seconds: float = Field(default=10.0, gt=0, le=1e5, description="time limit of one call")
    failure_answer: str | None = Field(default=None, description=_TOOL_FAILURE)

    @model_validator(mode="after")
    def _is_a_function(self) -> Self:
        if self.function not in BUILT_IN_TOOLS and not is_function_path(self.function):
            raise ValueError(
                f"function={self.function!r} is none of {', '.join(BUILT_IN_TOOLS)} and no module:function"
            )
        return self
