"""A model with low-rank adapters as their equation says: y = W x + (alpha / rank) B A x, W frozen, B zero at first.

Queries, keys and values have one A, and so have gate and up. Nothing is imported from the project; the numbers that A
starts with are chance, and are given. Source: LoRA arXiv:2106.09685, section 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.reference.critic_free import CriticFreeReference, CriticFreeSettings
from tests.reference.ppo import Reference, Settings, adamw

_SHARING = {
    "linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "linear_proj": ("self_attn.o_proj",),
    "linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "linear_fc2": ("mlp.down_proj",),
}


class LowRank(nn.Module):
    """A linear with an adapter."""

    def __init__(self, linear: nn.Linear, down: nn.Parameter, scale: float) -> None:
        super().__init__()
        self.linear, self.down, self.scale = linear, down, scale
        self.up = nn.Parameter(torch.zeros(linear.out_features, len(down), dtype=torch.float64))

    def forward(self, given: Tensor) -> Tensor:
        """[..., outputs] from [..., inputs]."""
        return self.linear(given) + self.scale * (given @ self.down.T @ self.up.T)


def adapted(model: nn.Module, starts: Mapping[str, Tensor], scale: float) -> nn.Module:
    """The model with adapters, by the numbers that their A start with: by `layer.linear`, [rank, inputs]."""
    model.requires_grad_(False)
    for name, start in starts.items():
        layer, linear = name.split(".")
        down = nn.Parameter(start.double().clone())
        for projection in _SHARING[linear]:
            path = f"model.layers.{layer}.{projection}"
            plain = model.get_submodule(path)
            assert isinstance(plain, nn.Linear)
            model.set_submodule(path, LowRank(plain, down, scale))
    return model


def changes(model: nn.Module) -> dict[str, Tensor]:
    """By the name of a weight, what its adapter adds to it."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, LowRank)}
    return {f"{name}.weight": (m.scale * m.up @ m.down).detach() for name, m in found.items()}


class AdaptedReference(CriticFreeReference):
    """A run without a critic that trains an adapter; the reference model is the actor without it."""

    def __init__(
        self, actor: Path, reward: Path, settings: CriticFreeSettings, starts: Mapping[str, Tensor], scale: float
    ) -> None:
        super().__init__(actor, actor, reward, settings)
        self.start_from(adapted(self.actor, starts, scale))


class AdaptedPPO(Reference):
    """A run of PPO that trains an adapter of the actor, and an adapter and the scalar head of the critic.

    The reference is the actor without its adapter.
    """

    def __init__(
        self,
        actor: Path,
        critic: Path,
        reward: Path,
        settings: Settings,
        *,
        starts: Mapping[str, Mapping[str, Tensor]],
        scale: float,
    ) -> None:
        """`starts` has the initial weights of the adapters, by role."""
        super().__init__(actor, critic, actor, reward, settings)
        self.start_from(adapted(self.actor, starts["actor"], scale))
        adapted(self.critic, starts["critic"], scale)
        self.critic.get_submodule("score").requires_grad_(True)
        self._critic_adam = adamw(self.critic, settings.critic_learning_rate, settings)
