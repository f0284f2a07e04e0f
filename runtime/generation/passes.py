"""What goes through one pipeline stage in a round: single tokens of rows that go on, and tokens that are not cached.

On a CPU all is straight on the weights, and the first pack of what is not cached goes with the single tokens: a pass of
few tokens costs more to call than to compute. On a GPU a decode step is recorded, and so are short packs of rows that
begin. Packs of rows that go on go through megatron's modules there, as do all where kernels were not chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from meshwright.runtime.generation.decoding import Decoding
from meshwright.runtime.generation.packed_attention import packed_reads
from meshwright.runtime.generation.packed_step import PackedStep
from meshwright.runtime.generation.prefill import prefill_reads
from meshwright.runtime.generation.recorded_prefills import Prefills
from meshwright.runtime.generation.seating import Part
from meshwright.runtime.generation.table_attention import StepReads, step_reads, table_reads
from meshwright.runtime.model.cache_blocks import Numbers
from meshwright.runtime.model.cached_forward import forward_continued
from meshwright.runtime.model.mesh import Mesh
from meshwright.runtime.model.model_shard import Decoder
from meshwright.runtime.model.pipeline_p2p import Relay

Text: TypeAlias = tuple[int, Sequence[int]]
"""A slot, and the tokens that its sequence has."""


class StepRows(NamedTuple):
    """Rows [C] that take a decode step, which may be none."""

    slots: Numbers
    cached: Numbers
    """Tokens in the cache."""
    tokens: Numbers
    """Those behind them."""


NO_STEPS = StepRows(*(np.zeros(0, dtype=np.int64) for _ in StepRows._fields))


class _Pack(NamedTuple):
    """Parts of texts, one behind the other."""

    slots: tuple[int, ...]
    cached: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: Numbers
    """[S]"""
    whole: list[int]
    """The parts that end their texts, by their places."""

    @classmethod
    def of(cls, parts: Sequence[Part], texts: Sequence[Text]) -> _Pack:
        return cls(
            slots=tuple(texts[row][0] for row, _, _ in parts),
            cached=tuple(first for _, first, _ in parts),
            lengths=tuple(end - first for _, first, end in parts),
            tokens=np.array([token for row, first, end in parts for token in texts[row][1][first:end]], dtype=np.int64),
            whole=[index for index, (row, _, end) in enumerate(parts) if end == len(texts[row][1])],
        )


class Passes:
    """Of one rank."""

    def __init__(
        self,
        step: PackedStep,
        decoding: Decoding,
        model: Decoder,
        mesh: Mesh,
        relay: Relay,
        *,
        prefills: Prefills | None = None,
    ) -> None:
        """`decoding` takes the decode steps that go alone, and `prefills` packs of rows that begin, if given."""
        self._step, self._decoding, self._cache = step, decoding, step.cache
        self._model, self._mesh, self._relay, self._prefills = model, mesh, relay, prefills
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._by_modules = parameter.is_cuda
        self._per_group = model.spec.num_heads // model.spec.num_kv_heads

    def count(self, num_steps: int, num_packs: int) -> int:
        """How often the layers are passed."""
        return num_packs + bool(num_steps) if self._by_modules else max(num_packs, bool(num_steps))

    def __call__(self, steps: StepRows, texts: Sequence[Text], packs: Sequence[Sequence[Part]]) -> Tensor | None:
        """Keys and values of the steps' tokens and of the texts, which lie in packs; what the last stage says of the
        former and of the last token of each text [B, V / tp], nothing before it or where there is none."""
        joined = None if self._by_modules or not packs or not len(steps.slots) else steps
        said = [] if joined or not len(steps.slots) else [self._stepped(steps)]
        for parts in packs:
            pack = _Pack.of(parts, texts)
            if self._prefills is not None and not any(pack.cached):
                said.append(self._prefilled(self._prefills, pack))
            else:
                said.append(self._through_modules(pack) if self._by_modules else self._packed(pack, joined))
            joined = None
        if not said or not self._mesh.is_last_stage:
            return None
        return said[0] if len(said) == 1 else torch.cat(said)

    def successive(self, steps: StepRows, count: int) -> Callable[[Tensor], Tensor]:
        """Decode steps of the same rows one after the other, `count` at most, of a stage alone that reads by tables:
        each takes the tokens [B] that are next, on the device, and answers with logits [B, V / tp]."""
        return self._decoding.successive(table_reads(self._cache.tables, steps.slots, steps.cached, count))

    def _stepped(self, steps: StepRows) -> Tensor:
        return self._sent(self._decoding(self._inputs(steps.tokens), self._reads(steps)))

    def _packed(self, pack: _Pack, steps: StepRows | None) -> Tensor:
        """Straight on the weights, behind the steps."""
        of_steps = None if steps is None else self._reads(steps)  # before others: it may move blocks
        reads = packed_reads(self._cache, pack.slots, pack.cached, pack.lengths, self._per_group)
        ends = torch.from_numpy(np.cumsum(pack.lengths)[pack.whole] - 1)
        tokens = pack.tokens if steps is None else np.concatenate([steps.tokens, pack.tokens])
        return self._sent(self._step.packed(self._inputs(tokens), reads, ends, of_steps))

    def _prefilled(self, prefills: Prefills, pack: _Pack) -> Tensor:
        reads = prefill_reads(self._cache.tables, pack.slots, pack.lengths, pack.whole)
        return self._sent(prefills(self._inputs(pack.tokens), reads))

    def _through_modules(self, pack: _Pack) -> Tensor:
        rows = self._cache.continue_rows(pack.slots, pack.cached, pack.lengths)
        tokens = torch.from_numpy(pack.tokens).to(self._device)
        output = forward_continued(self._model, self._mesh, self._relay, tokens, rows, ends_only=True)
        return self._sent(output.squeeze(1)[pack.whole] if self._mesh.is_last_stage else output)

    def _reads(self, steps: StepRows) -> StepReads:
        return step_reads(self._cache, steps.slots, steps.cached)

    def _inputs(self, tokens: Numbers) -> Tensor:
        """The tokens [S], or their hidden states [S, hidden] from the earlier stage."""
        if self._mesh.is_first_stage:
            return torch.from_numpy(tokens)
        return self._relay.receive_hidden((len(tokens), self._model.spec.hidden_size), self._dtype)

    def _sent(self, output: Tensor) -> Tensor:
        """The same, which goes to the next stage where there is one."""
        if not self._mesh.is_last_stage:
            self._relay.send_hidden(output)
        return output
