"""PPO as its equations say it: one process, float64, the modules of transformers, no plan.

Nothing here is imported from the project. Of a run it is given what chance and the clock decided: which tokens were
drawn, by which version of the policy, and which responses the run says were cut. Everything else is computed again.

A response of R tokens is R predictions: what is known of its tokens are tensors [R], row by row, without padding.
Sources: PPO arXiv:1707.06347, GAE arXiv:1506.02438, the penalty in the reward arXiv:2203.02155, decoupled PPO
arXiv:2110.00641, AdamW arXiv:1711.05101, SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of a job, under the names that a job gives them."""

    num_minibatches: int
    num_epochs: int
    max_response: int
    end_tokens: frozenset[int]
    decoupled: bool
    """Whether tokens may be stale: then they are weighted against the policy that drew them."""
    actor_learning_rate: float
    critic_learning_rate: float
    warmup_steps: int
    cosine_steps: int
    """Of the actor's rate, warm-up among them; behind them it is nothing. The critic's is constant."""
    critic_warmup_steps: int
    """The first steps, in which only the critic learns."""
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    weight_decay: float
    max_grad_norm: float
    clip_ratio: float
    value_clip: float
    kl_coefficient: float
    gamma: float
    gae_lambda: float
    entropy_coefficient: float
    whiten_advantages: bool
    importance_cap: float
    reward_scale: float
    reward_clip: float
    truncation: str
    missing_end_penalty: float
    temperature: float
    top_k: int
    top_p: float
    seed: int
    old_logprobs: str = "recompute"
    """The source of the log-probabilities before the updates, as the key of a job."""
    kept_tokens: int = 0
    """If not 0, every distribution is over the tokens that the filters left when the token was drawn."""


@dataclass(frozen=True)
class Row:
    """A prompt and the response that a run drew."""

    ids: Tensor  # [P + R], prompt and response
    num_prompt: int
    versions: tuple[int, ...]  # [R], the updates that the policy had seen which drew each token
    draw: int
    """Which prompt of the whole run this is: its place in the batches laid end to end."""

    @property
    def response(self) -> Tensor:
        return self.ids[self.num_prompt :]

    def is_cut(self, settings: Settings) -> bool:
        """Whether the response ended by its length. An end token ends it wherever it stands, and nothing else does."""
        ended = [int(token) in settings.end_tokens for token in self.response]
        assert not any(ended[:-1]), "a response goes on behind an end token"
        assert ended[-1] or len(ended) == settings.max_response, "a response stops without an end"
        return not ended[-1]


@dataclass(frozen=True)
class Learnt:
    """What a step computes, row by row, and the metrics of each of its updates."""

    cut: list[bool]
    scores: list[Tensor]
    behaviour: list[Tensor]
    proximal: list[Tensor]
    ref: list[Tensor]
    values: list[Tensor]
    advantages: list[Tensor]
    returns: list[Tensor]
    weights: list[Tensor]
    draws_explained: float
    """Share of the tokens that the sampled distribution and the hashed number lead to."""
    minibatches: list[list[int]]
    masks: list[Tensor | None] = field(default_factory=list)
    actor_updates: list[dict[str, float]] = field(default_factory=list)
    critic_updates: list[dict[str, float]] = field(default_factory=list)


Scorer: TypeAlias = Callable[[Row], float]


class Reference:
    """A run of PPO from four Hugging Face directories."""

    def __init__(self, actor: Path, critic: Path, ref: Path, reward: Path | Scorer, settings: Settings) -> None:
        self.settings = settings
        self.actor, self.ref, self.critic = language_model(actor), language_model(ref), scalar_model(critic)
        self.reward = scalar_model(reward) if isinstance(reward, Path) else reward
        self._critic_adam = adamw(self.critic, settings.critic_learning_rate, settings)
        self.start_from(self.actor)

    def start_from(self, actor: nn.Module) -> None:
        """Trains this actor from the first step on."""
        self.actor = actor
        self._actor_adam = adamw(actor, self.settings.actor_learning_rate, self.settings)
        self._policies = [copy.deepcopy(actor)]

    def step(self, step: int, rows: Sequence[Row]) -> Learnt:
        """One PPO step: experience, then the updates of all minibatches of all epochs."""
        learnt = self._experience(rows)
        for group in self._actor_adam.param_groups:
            group["lr"] = self.settings.actor_learning_rate * share_of_rate(step, self.settings)
        for epoch in range(self.settings.num_epochs):
            order = list(range(len(rows)))
            random.Random(f"{self.settings.seed}/{step}/{epoch}").shuffle(order)
            size = len(rows) // self.settings.num_minibatches
            learnt.minibatches.extend([order[first : first + size] for first in range(0, len(rows), size)])
        for chosen in learnt.minibatches:
            learnt.critic_updates.append(self._update_critic(rows, learnt, chosen))
            if step >= self.settings.critic_warmup_steps:
                learnt.actor_updates.append(self._update_actor(rows, learnt, chosen))
        self._policies.append(copy.deepcopy(self.actor))
        return learnt

    @torch.no_grad()
    def _experience(self, rows: Sequence[Row]) -> Learnt:
        s = self.settings
        cut = [row.is_cut(s) for row in rows]
        drawn_from = [sampled_logits(self._policies, row) for row in rows]
        masks = masks_of(drawn_from, s)
        behaviour, proximal, ref = (
            [of_tokens(of_row, row, s, mask) for of_row, row, mask in zip(logits, rows, masks, strict=True)]
            for logits in (drawn_from, response_logits(self.actor, rows), response_logits(self.ref, rows))
        )
        explained = torch.cat([explains(logits, row, s) for logits, row in zip(drawn_from, rows, strict=True)])
        values = scalars(self.critic, rows)  # [R + 1] each: before every token, and behind the last
        scores = scores_of(self.reward, rows)
        if s.old_logprobs == "generator":
            proximal = behaviour
        advantages = [
            advantages_of(rewards_of(score, pi, pi_ref, is_cut, s), v, is_cut, s)
            for score, pi, pi_ref, v, is_cut in zip(scores, proximal, ref, values, cut, strict=True)
        ]
        values = [v[:-1] for v in values]
        returns = [a + v for a, v in zip(advantages, values, strict=True)]
        ratios = [(pi - mu).exp().clamp(max=s.importance_cap) for pi, mu in zip(proximal, behaviour, strict=True)]
        return Learnt(
            cut=cut,
            scores=scores,
            behaviour=behaviour,
            proximal=proximal,
            ref=ref,
            values=values,
            advantages=whitened(advantages) if s.whiten_advantages else advantages,
            returns=returns,
            weights=ratios if s.decoupled else [torch.ones_like(ratio) for ratio in ratios],
            draws_explained=float(explained.double().mean()),
            minibatches=[],
            masks=masks,
        )

    def _update_actor(self, rows: Sequence[Row], learnt: Learnt, chosen: Sequence[int]) -> dict[str, float]:
        s, some = self.settings, [rows[index] for index in chosen]
        masks = [learnt.masks[index] for index in chosen]
        of_rows = zip(response_logits(self.actor, some), masks, strict=True)
        log_p = torch.cat([log_policy(logits, s, mask) for logits, mask in of_rows])
        entropy = entropy_of(log_p)
        log_pi = log_p.gather(-1, torch.cat([row.response for row in some])[:, None])[:, 0]
        old, advantages, weights = (picked(x, chosen) for x in (learnt.proximal, learnt.advantages, learnt.weights))
        ratio, held = (log_pi - old).exp(), truncated(log_pi, old, s)
        surrogate = torch.minimum(held * advantages, held.clamp(1 - s.clip_ratio, 1 + s.clip_ratio) * advantages)
        policy_loss = -(weights * surrogate).mean()
        grad_norm = descend(self.actor, self._actor_adam, policy_loss - s.entropy_coefficient * entropy.mean(), s)
        return {
            "policy_loss": float(policy_loss.detach()),
            "entropy": float(entropy.mean().detach()),
            "approx_kl": float((ratio - 1 - ratio.log()).mean().detach()),
            "ratio": float(ratio.mean().detach()),
            "grad_norm": grad_norm,
        }

    def _update_critic(self, rows: Sequence[Row], learnt: Learnt, chosen: Sequence[int]) -> dict[str, float]:
        s, some = self.settings, [rows[index] for index in chosen]
        values = torch.cat([v[:-1] for v in scalars(self.critic, some)])
        old, returns = picked(learnt.values, chosen), picked(learnt.returns, chosen)
        held = old + (values - old).clamp(-s.value_clip, s.value_clip)
        loss = 0.5 * torch.maximum((values - returns).square(), (held - returns).square()).mean()
        grad_norm = descend(self.critic, self._critic_adam, loss, s)
        return {"value_loss": float(loss.detach()), "value": float(values.detach().mean()), "grad_norm": grad_norm}


def masks_of(drawn_from: Sequence[Tensor], s: Settings) -> list[Tensor | None]:
    """The tokens [R, V] that the filters left for each row, by the logits that it was drawn from; None for all."""
    return [filtered(logits, s) if s.kept_tokens else None for logits in drawn_from]


def rewards_of(score: Tensor, pi: Tensor, pi_ref: Tensor, is_cut: bool, s: Settings) -> Tensor:
    """r_t = -beta (log pi - log ref), and at the last token the score, scaled and clipped: at a cut nothing if it is
    bootstrapped, else the score less the penalty of a missing end."""
    rewards = -s.kl_coefficient * (pi - pi_ref)
    score = (s.reward_scale * score).clamp(-s.reward_clip, s.reward_clip)
    if not is_cut:
        rewards[-1] += score
    elif s.truncation == "terminal":
        rewards[-1] += score - s.missing_end_penalty
    return rewards


def advantages_of(rewards: Tensor, values: Tensor, is_cut: bool, s: Settings) -> Tensor:
    """A_t = sum_k (gamma lambda)^k delta_{t+k} of delta_t = r_t + gamma V_{t+1} - V_t; behind the end V is 0.

    Where a cut is bootstrapped, V behind it is what the critic says there.
    """
    values = values.clone()
    if not (is_cut and s.truncation == "bootstrap"):
        values[-1] = 0.0
    deltas = rewards + s.gamma * values[1:] - values[:-1]
    decay = (s.gamma * s.gae_lambda) ** torch.arange(len(deltas), dtype=torch.float64)
    return torch.stack([(decay[: len(deltas) - t] * deltas[t:]).sum() for t in range(len(deltas))])


def whitened(advantages: Sequence[Tensor]) -> list[Tensor]:
    """With mean 0 and variance 1 over all tokens of the batch."""
    together = torch.cat([*advantages])
    return [(a - together.mean()) / (together.var(correction=0) + 1e-8).sqrt() for a in advantages]


def of_tokens(logits: Tensor, row: Row, s: Settings, kept: Tensor | None = None) -> Tensor:
    """log pi [R] of the response under softmax(logits / temperature): over all tokens whatever was filtered, or over
    the tokens that a mask [R, V] marks."""
    return log_policy(logits, s, kept).gather(-1, row.response[:, None])[:, 0]


def log_policy(logits: Tensor, s: Settings, kept: Tensor | None = None) -> Tensor:
    """The logarithms [R, V] of softmax(logits / temperature) over all tokens or over marked ones; others have -inf."""
    scaled = logits / s.temperature
    return (scaled if kept is None else scaled.masked_fill(~kept, -torch.inf)).log_softmax(-1)


def entropy_of(log_p: Tensor) -> Tensor:
    """The entropies [R] of distributions by their logarithms [R, V]."""
    left = log_p > -torch.inf
    return -torch.where(left, log_p.exp() * torch.where(left, log_p, 0.0), 0.0).sum(-1)


def filtered(logits: Tensor, s: Settings) -> Tensor:
    """The tokens [R, V] that the filters leave at each place."""
    kept = logits / s.temperature
    if s.top_k:
        kept = kept.masked_fill(kept < kept.topk(s.top_k).values[:, -1:], -torch.inf)
    likeliest = kept.softmax(-1).sort(descending=True)
    before = likeliest.values.cumsum(-1) - likeliest.values
    nucleus = torch.zeros_like(before, dtype=torch.bool).scatter(-1, likeliest.indices, before < s.top_p)
    return nucleus & (kept > -torch.inf)


def explains(logits: Tensor, row: Row, s: Settings) -> Tensor:
    """Whether [R] each token is the inverse of the cumulative filtered distribution at its hashed number in [0, 1)."""
    probabilities = log_policy(logits, s, filtered(logits, s)).exp()
    upper = probabilities.cumsum(-1).gather(-1, row.response[:, None])[:, 0]
    own = probabilities.gather(-1, row.response[:, None])[:, 0]
    number = torch.tensor([uniform(s.seed, row.draw, place) for place in range(len(row.response))], dtype=upper.dtype)
    return (own > 0) & (upper - own - 1e-4 <= number) & (number <= upper + 1e-4)


def uniform(seed: int, draw: int, place: int) -> float:
    """The number in [0, 1) that decides a token: SplitMix64 of the seed, of which draw it is and of its place in it."""
    bits = 2**64 - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & bits
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & bits
        return z ^ (z >> 31)

    state = seed
    for part in (draw, place):
        state = mix(state ^ mix((part + 0x9E3779B97F4A7C15) & bits))
    return (state >> 11) / 2**53


def sampled_logits(policies: Sequence[nn.Module], row: Row) -> Tensor:
    """Logits [R, V] that each token was drawn from: by the policy of its version, on the keys and values that were
    cached when the tokens before it were read, by whatever version read them."""
    cache, found, read = transformers.DynamicCache(), [], 0
    for version, drawn in itertools.groupby(row.versions):
        count = len(list(drawn))
        until = row.num_prompt + sum(map(len, found)) + count - 1
        output = policies[version](row.ids[None, read:until], past_key_values=cache, use_cache=True)
        found.append(output.logits[0, -count:])
        read = until
    return torch.cat(found)


def response_logits(model: nn.Module, rows: Sequence[Row]) -> list[Tensor]:
    """Logits [R, V] of every response token. Padding on the right changes nothing that stands before it."""
    logits = model(pad_sequence([row.ids for row in rows], batch_first=True)).logits
    return [logits[index, row.num_prompt - 1 : len(row.ids) - 1] for index, row in enumerate(rows)]


def scalars(model: nn.Module, rows: Sequence[Row]) -> list[Tensor]:
    """What a scalar head says [R + 1]: before every token of the response, and behind the last."""
    hidden = model.model(pad_sequence([row.ids for row in rows], batch_first=True)).last_hidden_state
    said = model.score(hidden).squeeze(-1)
    return [said[index, row.num_prompt - 1 : len(row.ids)] for index, row in enumerate(rows)]


def scores_of(reward: nn.Module | Scorer, rows: Sequence[Row]) -> list[Tensor]:
    """The score of each row: by a model at its last token, or by a function."""
    if isinstance(reward, nn.Module):
        return [said[-1] for said in scalars(reward, rows)]
    return [torch.tensor(reward(row), dtype=torch.float64) for row in rows]


def truncated(log_pi: Tensor, old: Tensor, s: Settings) -> Tensor:
    """The ratio pi / mu of a policy to the one that sampled, at most the cap: there its gradient is cap grad log pi.

    If the old log-probabilities were recomputed, the ratio is not truncated.
    """
    ratio = (log_pi - old).exp()
    if s.old_logprobs != "generator":
        return ratio
    at_cap = s.importance_cap * (1 + log_pi - log_pi.detach())
    return torch.where(ratio.detach() > s.importance_cap, at_cap, ratio)


def picked(values: Sequence[Tensor], chosen: Sequence[int]) -> Tensor:
    return torch.cat([values[index] for index in chosen])


def descend(model: nn.Module, adam: torch.optim.AdamW, loss: Tensor, s: Settings) -> float:
    """One update; the norm of the whole gradient before it was clipped."""
    adam.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), s.max_grad_norm)
    adam.step()
    return float(norm)


def share_of_rate(step: int, s: Settings) -> float:
    """Of the largest rate: up in a line, then down half a cosine (SGDR, arXiv:1608.03983, equation 5)."""
    if step < s.warmup_steps:
        return (step + 1) / s.warmup_steps
    return (1 + math.cos(math.pi * (step - s.warmup_steps) / (s.cosine_steps - s.warmup_steps))) / 2


def adamw(model: nn.Module, learning_rate: float, s: Settings) -> torch.optim.AdamW:
    """Norms and biases do not decay."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": s.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(s.adam_beta1, s.adam_beta2), eps=s.adam_eps)


def language_model(directory: Path) -> Any:
    return _exact(transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64))


def scalar_model(directory: Path) -> Any:
    return _exact(transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float64))


def _exact(model: nn.Module) -> nn.Module:
    """As its equations say: transformers computes norms in float32 whatever the model's type, and lets the embedding of
    the padding token learn nothing where that token stands in a row."""
    model.get_input_embeddings().padding_idx = None
    norms = [(name, m) for name, m in model.named_modules() if type(m).__name__.endswith("RMSNorm")]
    for name, found in norms:
        norm = nn.RMSNorm(len(found.weight), eps=found.variance_epsilon, dtype=torch.float64)
        norm.weight = found.weight
        model.set_submodule(name, norm)
    return model.eval()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """By name, each that is stored once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
