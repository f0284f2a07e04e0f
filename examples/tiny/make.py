"""Makes the tiny job's models and prompts: `python examples/tiny/make.py --out examples/tiny/build`.

    tokenizer/       bytes, <bos>, <eos>, <pad>
    actor/           a language model of about 0.8 million parameters; it is also the reference
    reward/          a sequence classifier with one label; the critic starts from it
    prompts.jsonl    {"id", "prompt"} for training
    held_out.jsonl   the same, from documents that no model has seen
    report.json      what was learnt, how long it took, and what all of it was made with

Called again with the same settings and library versions it does nothing.
"""

from __future__ import annotations

from threads import NUM_THREADS

# isort: split

import hashlib
import json
import platform
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import lessons
import rich
import rich.progress
import tokenizers
import torch
import transformers
import typer
from byte_tokenizer import byte_tokenizer
from corpus import documents
from preferences import comparisons, prompt_of

NUM_HELD_OUT = 512  # documents kept from the models, for the report's figures and the held-out prompts
NUM_PROMPTS = {"prompts.jsonl": 1024, "held_out.jsonl": 256}
_PARTS = ("tokenizer/tokenizer.json", "actor/model.safetensors", "reward/model.safetensors", *NUM_PROMPTS)


def main(
    out: Annotated[Path, typer.Option(help="Directory to write; replaced if it was made otherwise.")],
    seed: Annotated[int, typer.Option(help="Decides the models and the prompts.")] = 0,
    quick: Annotated[bool, typer.Option(help="A few steps only: files that load, nothing learnt.")] = False,
) -> None:
    """Makes four tiny Hugging Face models' worth of files for a PPO job, in about a minute on two cores."""
    torch.set_num_threads(NUM_THREADS)
    transformers.utils.logging.disable_progress_bar()
    if not make(out, seed=seed, recipe=lessons.QUICK if quick else lessons.Recipe()):
        rich.print(f"{out} is complete and was made with the same settings; nothing to do.")
        return
    rich.print_json((out / "report.json").read_text())


def make(out: Path, *, seed: int, recipe: lessons.Recipe) -> bool:
    """Writes the files under `out`; False, and nothing is done, when they are there and made in the same way."""
    made_with = _made_with(seed, recipe)
    if _is_made(out, made_with):
        return False
    start = time.perf_counter()
    shutil.rmtree(out, ignore_errors=True)
    texts = list(documents())
    random.Random(seed).shuffle(texts)
    held_out, known = texts[:NUM_HELD_OUT], texts[NUM_HELD_OUT:]
    byte_tokenizer(lessons.MAX_POSITIONS).save_pretrained(out / "tokenizer")
    _write_prompts(out, held_out=held_out, known=known, seed=seed)
    learnt = _teach(out, held_out=held_out, known=known, seed=seed, recipe=recipe)
    report = {"made_with": made_with, **learnt, "seconds": round(time.perf_counter() - start, 1)}
    (out / "report.json").write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")
    return True


def _made_with(seed: int, recipe: lessons.Recipe) -> dict[str, Any]:
    """Everything that decides the bytes of the files, but the processor."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return {
        "seed": seed,
        "recipe": asdict(recipe),
        "sources": hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest(),
        "versions": {
            "python": platform.python_version(),
            "tokenizers": tokenizers.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _is_made(out: Path, made_with: dict[str, Any]) -> bool:
    """The report is written last, so a directory that has one is whole unless something was removed from it."""
    report = out / "report.json"
    if not report.is_file() or not all((out / part).is_file() for part in _PARTS):
        return False
    return bool(json.loads(report.read_text())["made_with"] == made_with)


def _write_prompts(out: Path, *, held_out: Sequence[str], known: Sequence[str], seed: int) -> None:
    """Distinct prompts of 8 to 48 tokens, `<bos>` included; no held-out prompt is a training prompt."""
    rng = random.Random(seed)
    seen: set[str] = set()
    for name, source in (("held_out.jsonl", held_out), ("prompts.jsonl", known)):
        found = dict.fromkeys(prompt for text in source if (prompt := prompt_of(text, rng)) is not None)
        prompts = [prompt for prompt in found if prompt not in seen][: NUM_PROMPTS[name]]
        seen.update(prompts)
        lines = [json.dumps({"id": f"{name[0]}{i}", "prompt": prompt}) for i, prompt in enumerate(prompts)]
        (out / name).write_text("\n".join(lines) + "\n")


def _teach(
    out: Path, *, held_out: Sequence[str], known: Sequence[str], seed: int, recipe: lessons.Recipe
) -> dict[str, Any]:
    """Trains and writes both models; what they reached on the held-out documents."""
    with rich.progress.Progress(transient=True) as progress:

        def step_counter(name: str, steps: int) -> lessons.Advance:
            task = progress.add_task(name, total=steps)
            return lambda: progress.advance(task)

        advance = step_counter("actor: next token", recipe.language_steps)
        actor = lessons.teach_language(known, recipe, seed=seed, advance=advance)
        advance = step_counter("reward: preferences", recipe.reward_steps)
        reward = lessons.teach_preference(actor, known, recipe, seed=seed, advance=advance)
    actor.save_pretrained(out / "actor")
    reward.save_pretrained(out / "reward")
    examined = held_out[: recipe.examined_documents]
    compared = comparisons(examined, random.Random(seed))
    return {
        "actor_nats_per_token": round(lessons.held_out_loss(actor, examined, recipe), 4),
        "reward_pair_accuracy": lessons.pair_accuracy(reward, compared, recipe),
        "documents": {"known": len(known), "held_out": len(held_out), "examined": len(examined)},
    }


if __name__ == "__main__":
    typer.run(main)
