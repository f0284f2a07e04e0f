"""Seconds of an inference engine: a static batch, and continuous batching in its steady state.

The passes are those of `generation_cost`; this file says which passes a request or a round is made of. In the steady
state of n live sequences of r tokens each, a round draws n tokens and n/r prompts arrive in it (Little's law), so that
a round lasts one decode of n rows and the prefill of n/r prompts (Yu et al., Orca, OSDI 2022, section 4). A prompt that
was answered before is read from the cache and not computed (Zheng et al., SGLang, arXiv:2312.07104, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.fidelity.intervals import Doubt, Shift
from meshwright.cost_models.communication import Network, groups_of
from meshwright.cost_models.compute import AnalyticShard, WeightFormats
from meshwright.cost_models.cost import Cost
from meshwright.cost_models.generation_cost import Generation, generation_work
from meshwright.cost_models.kernels import Kernels, precision_named
from meshwright.cost_models.params import fullest_part
from meshwright.cost_models.protocol import StageQuery
from meshwright.cost_models.rounds import Prefill, Rounds, RoundWindow
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.efficiency import Efficiency, efficiency_of
from meshwright.profiles.errors import BadInput
from meshwright.profiles.frameworks import Framework
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout, layers_per_stage
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.table import Collective

_NO_PREFILL = Prefill(0, 0, 0)
_SIXTEEN_BITS = 2
"""Bytes of a weight of embedding and head, and of an activation: engines leave them in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class MeasuredEngine:
    """An engine as it was measured: kernels of its layers and of the head on one device, and collectives of several."""

    kernels: Kernels
    head_kernels: Kernels
    collectives: tuple[Collective, ...]


@dataclass(frozen=True, kw_only=True)
class Serving:
    """One replica of a model answering requests of `prompt_tokens` with `response_tokens` each.

    `weight_formats` are those of a checkpoint whose linears or experts are not in `precision`. With
    `prompts_are_cached` all prompts that arrive repeat ones whose keys and values are cached. `efficiency` may
    replace the constants of the device's family, `measured` the laws of kernels and collectives.
    """

    model: ModelSpec
    layout: Layout
    cluster: Cluster
    precision: str
    framework: Framework
    prompt_tokens: int
    response_tokens: int
    prompts_are_cached: bool = False
    weight_formats: WeightFormats | None = None
    efficiency: Efficiency | None = None
    measured: MeasuredEngine | None = None

    def shifted(self, shift: Shift) -> Serving:
        """The replica with an input shifted."""
        return replace(self, cluster=shift.cluster(self.cluster), framework=shift.framework(self.framework))

    @property
    def doubt(self) -> Doubt:
        """What makes its seconds uncertain besides the rates of the machine."""
        return Doubt(
            device=self.cluster.device.name,
            has_experts=self.model.experts is not None,
            only_generates=True,
            is_imported=self.measured is not None,
        )

    def slots(self) -> int:
        """Sequences that decode together: as many as the cache holds whole, and the engine allows.

        Raises BadInput when not even one fits.
        """
        layout, device, model = self.layout, self.cluster.device, self.model
        numbers = precision_named(self.precision, device)
        weights = self._weights_bytes()
        per_token = (
            max(layers_per_stage(model, layout.pp)) * model.shard(layout.tp).cached_elements * numbers.cache_bytes
        )
        free = self.framework.cache_share * (device.memory_bytes - weights - self._workspace_bytes())
        tokens = self.prompt_tokens + self.response_tokens
        if model.window:  # engines free what a window has left behind
            windowed = model.num_window_layers / model.num_layers
            tokens = (1 - windowed) * tokens + windowed * min(model.window.num_tokens, tokens)
        found = int(free / (per_token * tokens))
        if found < 1:
            raise BadInput(f"{model.name} at {layout} leaves no memory for one sequence; use a larger tp or pp.")
        return min(found, self.framework.max_rows)

    def _weights_bytes(self) -> float:
        """Bytes of the weights of the fullest rank."""
        model, layout, device = self.model, self.layout, self.cluster.device
        in_layers, at_ends = _linears_and_ends(model, layout)
        formats = self.weight_formats or WeightFormats(self.precision, self.precision)
        of_linears, of_experts = (precision_named(name, device).weight_bytes for name in formats)
        routed = 0.0
        if model.experts:
            of_layer = model.experts.routed_params(model.hidden_size, has_bias=model.expert_bias)
            layers = max(layers_per_stage(model, layout.pp)) * model.expert_layers_share
            routed = layers * of_layer / (layout.tp * layout.expert_replicas)
        return of_experts * routed + of_linears * (in_layers - routed) + _SIXTEEN_BITS * at_ends

    def _workspace_bytes(self) -> float:
        """Bytes of the activations of the largest pass that the engine may run, in 16 bits: hidden states and
        residuals, queries, keys and values, and both sides of the feed-forward activation."""
        shard, tokens = self.model.shard(self.layout.tp), self.framework.max_tokens or 0
        width = 4 * self.model.hidden_size + shard.attention_elements + shard.up_size + shard.ffn_size
        return _SIXTEEN_BITS * tokens * width

    def round_seconds(self, rows: int) -> Cost:
        """One token for each of `rows` sequences in the steady state, with the prompts that arrive meanwhile."""
        window = RoundWindow(1, rows, self.prompt_tokens + self.response_tokens / 2)
        most = self.framework.max_tokens or rows * self.prompt_tokens
        together = max(1, min(rows, most // self.prompt_tokens))
        arriving = Prefill(rows / self.response_tokens / together, together, self.prompt_tokens)
        return self._seconds(
            Rounds(1, (window,), _NO_PREFILL, _NO_PREFILL if self.prompts_are_cached else arriving), rows
        )

    def offline_rate(self, num_requests: int) -> float:
        """Output tokens per second of this many equal requests, all there at the start: they run in whole waves."""
        slots = self.slots()
        waves, rest = divmod(num_requests, slots)
        seconds = waves * self.round_seconds(slots).total if waves else 0.0
        seconds += self.round_seconds(rest).total if rest else 0.0
        return num_requests / seconds

    def batch_seconds(self, rows: int) -> Cost:
        """`rows` requests that start and end together; one response token is the prefill's own."""
        decodes = self.response_tokens - 1
        windows = (RoundWindow(decodes, rows, self.prompt_tokens + self.response_tokens / 2),) if decodes else ()
        rounds = Rounds(self.response_tokens, windows, Prefill(1, rows, self.prompt_tokens), _NO_PREFILL)
        return self._seconds(rounds, rows)

    def _seconds(self, rounds: Rounds, rows: int) -> Cost:
        layout, device, framework = self.layout, self.cluster.device, self.framework
        efficiency = self.efficiency or efficiency_of(device.kind, device.name)
        measured = self.measured
        shard = AnalyticShard(
            self.model.shard(layout.tp),
            device,
            self.precision,
            efficiency,
            1.0,
            spread=layout.expert_replicas,
            folded=layout.fold_size,
            framework=framework,
            kernels=measured.kernels if measured else None,
            head_kernels=measured.head_kernels if measured else None,
            weight_formats=self.weight_formats,
        )
        schedule = Schedule(generation_slots=rows)
        generation = Generation(
            query=StageQuery(
                stage=PPO_GRAPH.by_name["actor_generate"], model=self.model, layout=layout, schedule=schedule
            ),
            shard=shard,
            groups=groups_of(layout, self.cluster),
            network=Network(
                self.cluster,
                efficiency,
                measured.collectives if measured else (),
                peer_reductions=framework.peer_reductions,
            ),
            element_bytes=precision_named(self.precision, device).size,
            framework=framework,
        )
        return generation.seconds(generation_work(rounds, rows, layout.pp))


def _linears_and_ends(model: ModelSpec, layout: Layout) -> tuple[float, float]:
    """Parameters of the fullest rank: of its layers, and of embedding and head."""
    whole = fullest_part(model, layout.tp, layout.pp, layout.expert_replicas).num_params
    ends = model.embedding_params * (1 if model.tied_embeddings or layout.pp > 1 else 2) / layout.tp
    return whole - ends, ends
