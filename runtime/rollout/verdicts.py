"""The stage of a judge that generates: it samples a verdict on each sequence, and reads a score off its text.

The judge reads the token ids of a sequence as the actor sampled them, between those of its own two texts. It takes the
likeliest token each time, so equal sequences have equal verdicts up to the rounding of a forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from meshwright.planner.job.generated_verdicts import JudgeSpec
from meshwright.profiles.workload import Workload
from meshwright.runtime.inference.engine import Generator
from meshwright.runtime.inference.slots import Prompt
from meshwright.runtime.rollout.prompts import PromptData, judge_template
from meshwright.runtime.training.weight_copies import WeightCopy


class JudgeStage:
    """Generates verdicts with one replica's copy of the judge; every rank of the replica calls the same methods."""

    def __init__(self, judge: JudgeSpec, data: PromptData, copy: WeightCopy, workload: Workload, *, rows: int) -> None:
        """At most `rows` verdicts are generated at a time. `workload` is the judge's own, `JudgeSpec.judged`."""
        self._judge, self._data, self._copy, self._workload, self._rows = judge, data, copy, workload, rows
        self._before, self._after = judge_template(judge, data)

    def scores(self, sequences: Mapping[int, Tensor]) -> tuple[dict[int, float], dict[str, float]]:
        """The score of each sequence [T] by row, and facts of the verdicts: their tokens, and those without a score."""
        prompts = [
            Prompt(row=row, sample_id=row, tokens=(*self._before, *map(int, tokens), *self._after))
            for row, tokens in sequences.items()
        ]
        generator = Generator(
            self._copy.decoder,
            self._copy.spec,
            self._copy.mesh,
            num_slots=max(1, min(self._rows, len(prompts))),
            max_tokens=self._workload.max_tokens,
            max_response=self._workload.max_response,
            eos_tokens=frozenset(self._data.ends.tokens),
            temperature=1.0,
            top_k=1,
            seed=0,
            use_cuda_graphs=False,
        )
        verdicts = generator.generate(prompts)
        read = {verdict.row: self._judge.parse(self._data.text(verdict.tokens)) for verdict in verdicts}
        scores = {row: self._judge.otherwise if score is None else score for row, score in read.items()}
        facts = {
            "verdict_tokens": float(sum(len(verdict.tokens) for verdict in verdicts)),
            "verdicts_without_score": float(sum(score is None for score in read.values())),
        }
        return scores, facts
