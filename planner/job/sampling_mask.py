"""The rule of a sampling mask: the set of tokens that `top_k` and `top_p` leave is kept with each position of a sample.

Every log-probability that a ratio or a divergence is made of is then that of the distribution over the set.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.job.algorithm_settings import LearningSettings


def sampling_mask_violations(kept_tokens: int, settings: LearningSettings, settings_key: str) -> Iterator[str]:
    """One sentence if the sets of tokens that the filters leave may have more than `kept_tokens` tokens."""
    if not kept_tokens or 0 < settings.top_k <= kept_tokens:
        return
    yield (
        f"workload.kept_tokens={kept_tokens}: {settings_key}.top_k={settings.top_k} leaves "
        f"{'more tokens' if settings.top_k else 'all tokens, and top_p any number of them'}; use a top_k of 1 to "
        f"{kept_tokens}, or raise kept_tokens"
    )
