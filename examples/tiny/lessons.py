"""Teaches the two tiny models: next-token prediction for the actor, pairwise preference for the reward model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from byte_tokenizer import BOS, EOS, PAD, VOCAB_SIZE, encode, right_padded
from preferences import FLAWS, Comparison, comparisons
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

MAX_POSITIONS = 512

_SIZE_JITTER = 16  # tokens: mixes rows of nearly the same size differently in each epoch
_Row = TypeVar("_Row")

Advance = Callable[[], None]
"""Called after each step."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How long and how fast the models learn. Rates are Muon's, matched to AdamW's; they rise, then fall to nothing."""

    language_steps: int = 230
    language_rate: float = 1.5e-2
    examined_documents: int = 192  # held-out ones that the report's figures come from
    reward_steps: int = 160
    reward_rate: float = 5e-3
    batch_tokens: int = 2048  # padding included


QUICK = Recipe(language_steps=3, examined_documents=16, reward_steps=2, batch_tokens=512)
"""Enough to write files that load; nothing is learnt."""


def tiny_config() -> LlamaConfig:
    """Grouped-query attention, and sizes that tp=2, pp=2 and pp=4 divide."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def teach_language(documents: Sequence[str], recipe: Recipe, *, seed: int, advance: Advance) -> LlamaForCausalLM:
    """An actor that writes like `documents` and ends by itself."""
    torch.manual_seed(seed)
    actor = LlamaForCausalLM(tiny_config())
    rows = [(*encode(document), EOS) for document in documents]
    batches = _epochs(rows, len, recipe.batch_tokens, random.Random(seed))
    _fit(
        actor,
        (language_loss(actor, batch) for batch in batches),
        steps=recipe.language_steps,
        rate=recipe.language_rate,
        advance=advance,
    )
    return actor


def teach_preference(
    actor: LlamaForCausalLM, documents: Sequence[str], recipe: Recipe, *, seed: int, advance: Advance
) -> LlamaForSequenceClassification:
    """A reward model that starts from the actor's layers and learns which of two responses is the true one."""
    torch.manual_seed(seed)
    config = tiny_config()
    config.num_labels = 1
    reward = LlamaForSequenceClassification(config)
    reward.model.load_state_dict(actor.model.state_dict())
    rng = random.Random(seed)
    batches = _epochs(comparisons(documents, rng), _comparison_tokens, recipe.batch_tokens, rng)
    _fit(
        reward,
        (-F.logsigmoid(margins(reward, batch)).mean() for batch in batches),
        steps=recipe.reward_steps,
        rate=recipe.reward_rate,
        advance=advance,
    )
    return reward


def language_loss(actor: LlamaForCausalLM, rows: Sequence[Sequence[int]]) -> Tensor:
    """Mean cross-entropy of the next token, in nats, over the rows' own tokens."""
    ids = right_padded(rows)
    logits = actor(input_ids=ids[:, :-1], use_cache=False).logits
    loss: Tensor = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD)
    return loss


def margins(reward: LlamaForSequenceClassification, batch: Sequence[Comparison]) -> Tensor:
    """By how much each chosen text outscores the rejected ones, in the order of FLAWS [len(batch), len(FLAWS)].

    The negated log-sigmoid of a margin is the Bradley-Terry loss of the pair; all pairs of one prompt are taken
    together (InstructGPT, arXiv:2203.02155, equation 1).
    """
    rows = [row for c in batch for row in (c.chosen, *(c.rejected[flaw] for flaw in FLAWS))]
    scores: Tensor = reward(input_ids=right_padded(rows), use_cache=False).logits.view(len(batch), 1 + len(FLAWS))
    return scores[:, :1] - scores[:, 1:]


@torch.no_grad()
def held_out_loss(actor: LlamaForCausalLM, documents: Sequence[str], recipe: Recipe) -> float:
    """Nats per token on `documents`."""
    rows = [(*encode(document), EOS) for document in documents]
    nats, tokens = 0.0, 0
    for batch in _batches(rows, len, recipe.batch_tokens, random.Random(0)):
        predicted = sum(len(row) - 1 for row in batch)
        nats += float(language_loss(actor, batch)) * predicted
        tokens += predicted
    return nats / tokens


@torch.no_grad()
def pair_accuracy(
    reward: LlamaForSequenceClassification, compared: Sequence[Comparison], recipe: Recipe
) -> dict[str, float]:
    """Share of pairs that are ranked rightly, by flaw and for `all`."""
    batches = _batches(compared, _comparison_tokens, recipe.batch_tokens, random.Random(0))
    right = torch.cat([margins(reward, batch) > 0 for batch in batches]).double().mean(dim=0)
    by_flaw = dict(zip(FLAWS, right.tolist(), strict=True))
    return {name: round(share, 4) for name, share in {"all": float(right.mean()), **by_flaw}.items()}


def _comparison_tokens(comparison: Comparison) -> int:
    rows = (comparison.chosen, *comparison.rejected.values())
    return len(rows) * max(map(len, rows))


def _batches(rows: Sequence[_Row], size: Callable[[_Row], int], budget: int, rng: random.Random) -> list[list[_Row]]:
    """All rows once, in batches of similar sizes whose padded size is at most `budget` (or of one row), shuffled."""
    batches: list[list[_Row]] = [[]]
    for row in sorted(rows, key=lambda row: size(row) + rng.uniform(0, _SIZE_JITTER)):
        widest = max(map(size, [*batches[-1], row]))
        if batches[-1] and widest * (len(batches[-1]) + 1) > budget:
            batches.append([])
        batches[-1].append(row)
    rng.shuffle(batches)
    return batches


def _epochs(rows: Sequence[_Row], size: Callable[[_Row], int], budget: int, rng: random.Random) -> Iterator[list[_Row]]:
    """Batches without end; every row once per epoch, in other company each time."""
    while True:
        yield from _batches(rows, size, budget, rng)


def _fit(model: PreTrainedModel, losses: Iterator[Tensor], *, steps: int, rate: float, advance: Advance) -> None:
    """Minimises each loss in turn: Muon for the layers' matrices, AdamW for the rest. Leaves the model in eval mode.

    Muon needs half the steps of AdamW here: held-out 1.37 nats against 1.51 after 250 and 450 steps (torch 2.13).
    """
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or ".layers." not in name]
    optimizers: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate / 4, betas=(0.9, 0.95), weight_decay=0.0),
    )
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: _schedule(step, steps)) for o in optimizers]
    model.train()
    for _ in range(steps):
        torch.autograd.backward(next(losses))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()
        advance()
    model.eval()


def _schedule(step: int, steps: int) -> float:
    """Up over the first tenth, then down to nothing."""
    return min(1.0, 10 * (step + 1) / steps) * (1 - step / steps)
