"""TRL's PPO, run in an environment of its own: `python trl_ppo.py SETTINGS`, or the same under torchrun.

It writes `rank<R>.jsonl` beside the settings, a line a step: its wall time, and the response tokens of this rank that
were paid and learnt from, the end token among them. Nothing of TRL is changed; what is counted is seen by the reward
model, which is given each response once, cut behind its end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer


def main(path: Path) -> None:
    settings = json.loads(path.read_text())
    torch.set_num_threads(settings["threads"])
    transformers.utils.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"], padding_side="left")
    prompts = [json.loads(line)["prompt"] for line in Path(settings["prompts"]).read_text().splitlines()]
    actor, ref = (AutoModelForCausalLM.from_pretrained(settings["actor"]) for _ in range(2))
    reward, critic = (
        AutoModelForSequenceClassification.from_pretrained(settings["reward"], num_labels=1) for _ in range(2)
    )
    counted = _Counted(DataCollatorWithPadding(tokenizer), path.parent)
    reward.base_model.register_forward_pre_hook(counted.see, with_kwargs=True)
    PPOTrainer(
        args=_config(settings, path.parent),
        processing_class=tokenizer,
        model=actor,
        ref_model=ref,
        reward_model=reward,
        value_model=critic,
        train_dataset=Dataset.from_list([{"input_ids": tokenizer(prompt)["input_ids"]} for prompt in prompts]),
        data_collator=counted,
        callbacks=[counted],
    ).train()


def _config(settings: dict[str, Any], directory: Path) -> PPOConfig:
    """What the job says, in TRL's words. Its minibatches are of the whole batch's rows over all ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rows = settings["batch_size"] // ranks
    return PPOConfig(
        output_dir=str(directory / "out"),
        total_episodes=settings["batch_size"] * settings["steps"],
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        local_rollout_forward_batch_size=rows,
        num_mini_batches=settings["num_minibatches"],
        num_ppo_epochs=settings["num_epochs"],
        response_length=settings["longest_response"],
        stop_token="eos" if settings["ends"] else None,
        temperature=1.0,
        learning_rate=settings["learning_rate"],
        kl_coef=settings["kl_coefficient"],
        lam=settings["gae_lambda"],
        gamma=1.0,
        cliprange=0.2,
        cliprange_value=0.2,
        seed=settings["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class _Counted(TrainerCallback):
    """The collator of prompts, the reward model's watcher, and the clock: a line a step."""

    def __init__(self, collate: DataCollatorWithPadding, directory: Path) -> None:
        self._collate = collate
        self._path = directory / f"rank{os.environ.get('RANK', '0')}.jsonl"
        self._prompt_tokens: deque[int] = deque()
        self._tokens, self._since = 0, 0.0

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        """Batches are made ahead of their steps, in the order of the steps."""
        self._prompt_tokens.append(sum(len(row["input_ids"]) for row in rows))
        return self._collate(rows)

    def see(self, _module: torch.nn.Module, _given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._tokens += int(named["attention_mask"].sum())

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._since = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        line = {"seconds": now - self._since, "response_tokens": self._tokens - self._prompt_tokens.popleft()}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._tokens, self._since = 0, now


if __name__ == "__main__":
    main(Path(sys.argv[1]))
