"""Checks that a run loads only built-in functions and functions of modules that its user has allowed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from meshwright.planner.job.rewards_and_tools import BUILT_IN, BUILT_IN_TOOLS, Reward, Tool
from meshwright.profiles.errors import BadInput


def require_allowed_rewards(
    rewards: Sequence[Reward], allowed: Collection[str], *, without_answers: Sequence[str] = (), where: str = ""
) -> None:
    """Raises BadInput for a reward function of a module that is not allowed; the message starts with `where`.

    `without_answers` are the keys of the job's data whose prompts these rewards score and do not all have an answer.
    Raises BadInput for a built-in function that would score them. No module is imported.
    """
    for reward in rewards:
        if reward.function is None:
            continue
        if reward.function in BUILT_IN:
            if without_answers:
                raise BadInput(
                    f'{where}reward {reward.name}: {reward.function} needs an "answer" text beside every prompt of '
                    f"{' and '.join(without_answers)}; add it."
                )
            continue
        _require_allowed(f"{where}reward {reward.name}", reward.function, allowed)


def require_allowed_tool(tool: Tool, allowed: Collection[str]) -> None:
    """Raises BadInput for a tool of a module that is not allowed. No module is imported."""
    if tool.function not in BUILT_IN_TOOLS:
        _require_allowed("tool", tool.function, allowed)


def require_allowed_losses(functions: Sequence[tuple[str, str]], allowed: Collection[str]) -> None:
    """Raises BadInput for a loss or advantages, given by training stage, of a module that is not allowed. No module is
    imported."""
    for stage, function in functions:
        _require_allowed(stage, function, allowed)


def _require_allowed(subject: str, function: str, allowed: Collection[str]) -> None:
    module = function.partition(":")[0]
    if module not in allowed:
        raise BadInput(
            f"{subject}: {function} would run code of the module {module}, which was not allowed; give --allow-module "
            f"{module} if you trust it."
        )
