"""Which functions a run may load: those of modules that its user has named, beside the built-in ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from meshwright.planner.environment.rewards import BUILT_IN, Reward
from meshwright.profiles.errors import BadInput


def require_functions(rewards: Sequence[Reward], allowed: Collection[str], *, has_answers: bool) -> None:
    """Raises BadInput for a function of a module that is not among the allowed ones, and where a built-in function has
    no answers to compare with. Imports nothing."""
    for reward in rewards:
        if reward.function is None:
            continue
        if reward.function in BUILT_IN:
            if not has_answers:
                raise BadInput(
                    f'reward {reward.name}: {reward.function} needs an "answer" text beside every prompt of the data, '
                    "held-out ones too; add it."
                )
            continue
        module = reward.function.partition(":")[0]
        if module not in allowed:
            raise BadInput(
                f"reward {reward.name}: {reward.function} would run code of the module {module}, which was not allowed;"
                f" give --allow-module {module} if you trust it."
            )
