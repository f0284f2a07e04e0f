"""Small facts and toy cost models for the planner's tests."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from meshwright.cost_models.cost import Cost, Memory, Term
from meshwright.cost_models.protocol import LayoutCosts, QueriedLayoutCosts, QueryLoop, RefitQuery, StageQuery
from meshwright.planner.job.custom_graph import MODES, OwnGraph, OwnStage
from meshwright.planner.job.job import Facts, RoleModels
from meshwright.profiles.algorithms import Algorithm
from meshwright.profiles.experts import Experts
from meshwright.profiles.hardware import Cluster, Device, Link, MixedCluster
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_parts.adapter import Adapter
from meshwright.profiles.model_parts.image_encoder import ImageEncoder
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Recompute, Schedule
from meshwright.profiles.stages import TEACHERS, Stage, StageGraph
from meshwright.profiles.workload import Images, Workload


def model_spec(name: str, *, num_heads: int = 4, num_layers: int = 4, hidden_size: int = 64) -> ModelSpec:
    return ModelSpec(
        name=name,
        architecture="LlamaForCausalLM",
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_size=4 * hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        vocab_size=256,
        max_positions=512,
        tied_embeddings=False,
        activation="silu",
        norm_epsilon=1e-6,
        scalar_head=name in ("critic", "reward"),
    )


def small_facts(
    *,
    nodes: int = 1,
    ranks_per_node: int = 4,
    memory_bytes: int = 2**30,
    batch_size: int = 16,
    num_minibatches: int = 1,
    response: int = 128,
    num_heads: int = 4,
) -> Facts:
    """Four tiny models on a few ranks."""
    link = Link(seconds=1e-5, bytes_per_second=1e10)
    device = Device(
        name="toy",
        kind="cpu",
        memory_bytes=memory_bytes,
        memory_bytes_per_second=1e11,
        flops_per_second={"fp32": 1e12, "bf16": 2e12},
        launch_seconds=1e-6,
        source="made up for tests",
    )
    return Facts(
        models=RoleModels(**{r: model_spec(r, num_heads=num_heads) for r in ("actor", "critic", "ref", "reward")}),
        cluster=Cluster(
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            device=device,
            intra_node=link,
            inter_node=link,
            host=link,
            host_memory_bytes=2**36,
        ),
        precision="bf16",
        workload=Workload(
            batch_size=batch_size,
            prompt=LengthSpec(max=64, fixed=64),
            response=LengthSpec(max=response, fixed=response),
            num_minibatches=num_minibatches,
        ),
    )


def mixed_facts(*, memory_bytes: tuple[int, int] = (2**30, 2**30), speed: float = 2.0, **kw: int) -> Facts:
    """The same on two ranks of one kind and two that compute and read `speed` times as fast."""
    first, second = (small_facts(ranks_per_node=2, memory_bytes=size, **kw) for size in memory_bytes)
    assert isinstance(second.cluster, Cluster)
    slow = second.cluster.device
    rates = {"memory_bytes_per_second": slow.memory_bytes_per_second * speed}
    peaks = {dtype: rate * speed for dtype, rate in slow.flops_per_second.items()}
    fast = slow.model_copy(update={**rates, "name": "fast toy", "flops_per_second": peaks})
    parts = (first.cluster, second.cluster.model_copy(update={"device": fast}))
    between = Link(seconds=1e-4, bytes_per_second=1e9)
    return first.model_copy(update={"cluster": MixedCluster.model_validate({"parts": parts, "between": between})})


def critic_free_facts(
    algorithm: Algorithm = "grpo", *, group_size: int = 4, has_ref: bool = True, facts: Facts | None = None
) -> Facts:
    """The same as another algorithm, without a critic, and without a reference where none is asked for."""
    facts = facts or small_facts()
    models = facts.models.model_copy(update={"critic": None} | ({} if has_ref else {"ref": None}))
    workload = facts.workload.model_copy(update={"group_size": group_size})
    return facts.model_copy(update={"algorithm": algorithm, "models": models, "workload": workload})


def distill_facts(num_teachers: int = 1, facts: Facts | None = None, teacher_top_k: int | None = None) -> Facts:
    """The same as a distillation from teachers that have two layers more each, and no other model but the student."""
    facts = facts or small_facts()
    deeper = {
        role.value: replace(facts.models.actor, name=role.value, num_layers=facts.models.actor.num_layers + 2 * (1 + k))
        for k, role in enumerate(TEACHERS[:num_teachers])
    }
    models = RoleModels(actor=facts.models.actor, **deeper)
    return facts.model_copy(update={"algorithm": "distill", "models": models, "teacher_top_k": teacher_top_k})


def stated(graph: StageGraph) -> OwnGraph:
    """A graph in the words of a job."""
    kinds = {modes: kind for kind, modes in MODES.items()}
    first, *others = (
        OwnStage(
            name=stage.name,
            kind=kinds[stage.modes],
            role=stage.role,
            reads=stage.reads,
            writes=stage.writes,
            may_stream=stage.may_stream,
        )
        for stage in graph.stages
    )
    hosted = (
        OwnStage(name=host.name, kind="environment", reads=host.reads, writes=host.writes) for host in graph.host_stages
    )
    return OwnGraph(stages=(first, *hosted, *others))


def image_facts() -> Facts:
    """Small facts whose models read one to three images of a prompt, but for the reward model, which reads text."""
    facts = small_facts()
    encoder = ImageEncoder(
        num_blocks=2,
        hidden_size=32,
        ffn_size=64,
        num_heads=2,
        output_size=64,
        patch_elements=24,
        merge_size=2,
        num_full_blocks=1,
        window_patches=16,
        num_deepstack=1,
    )
    specs = {role: replace(spec, image_encoder=encoder) for role, spec in facts.models.by_name.items()}
    models = RoleModels(**{**specs, "reward": facts.models.by_name["reward"]})
    number = LengthSpec(max=3, histogram=((1, 2.0), (3, 1.0)))
    images = Images(number=number, tokens=LengthSpec(max=24, histogram=((4, 1.0), (24, 1.0))))
    return facts.model_copy(update={"models": models, "workload": facts.workload.model_copy(update={"images": images})})


def mixture_facts(facts: Facts) -> Facts:
    """The same with an actor and a reference of four experts, of which a token passes two."""
    experts = Experts(num_experts=4, experts_per_token=2, ffn_size=64)
    update = {role: replace(getattr(facts.models, role), experts=experts) for role in ("actor", "ref")}
    return facts.model_copy(update={"models": facts.models.model_copy(update=update)})


def adapted_facts(facts: Facts | None = None) -> Facts:
    """The same with an adapter of the actor, whose reference is the actor without it."""
    facts = facts or small_facts()
    actor = replace(facts.models.actor, adapter=Adapter(rank=4, alpha=8.0))
    models = facts.models.model_copy(update={"actor": actor, "ref": facts.models.actor})
    return facts.model_copy(update={"models": models, "ref_is_base": True})


def quantised_facts(facts: Facts | None = None) -> Facts:
    """The same on GPUs that multiply 8-bit floats, which the actor generates with."""
    facts = facts or small_facts()
    assert isinstance(facts.cluster, Cluster)
    peaks = {**facts.cluster.device.flops_per_second, "fp8": 4e12}
    device = facts.cluster.device.model_copy(update={"kind": "cuda", "flops_per_second": peaks})
    cluster = facts.cluster.model_copy(update={"device": device})
    return facts.model_copy(update={"cluster": cluster, "generation_weights": "fp8"})


@dataclass(frozen=True)
class ToyModel(QueryLoop):
    """A cost model by simple formulas: work divides over ranks, tp and pp lose a little, memory divides by tp x pp."""

    facts: Facts
    seconds_are_monotone = True

    def lower_bound_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        """Without what is lost."""
        del part
        workload = self.facts.workload
        tokens = workload.batch_size * (workload.prompt.max + workload.response.max)
        return model.num_params * tokens * 1e-10 * (3 if stage.trains else 1) / num_ranks

    def generation_lower_bound(self, query: StageQuery) -> float:
        """Not told apart."""
        del query
        return 0.0

    def with_row_split(self, query: StageQuery) -> Schedule:
        return query.schedule

    def seconds(self, query: StageQuery) -> Cost:
        layout, workload = query.layout, self.facts.workload
        tokens = workload.batch_size * (workload.prompt.max + workload.response.max)
        work = query.model.num_params * tokens * 1e-10 * (3 if query.stage.trains else 1)
        loss = 1 + 0.1 * (layout.tp - 1) + 0.05 * (layout.pp - 1) + 0.2 * (query.schedule.recompute is Recompute.FULL)
        small = 1 + 0.3 / query.schedule.micro_batch_size
        if query.stage.generates:
            small = 1 + 4 / query.schedule.generation_slots
        return Cost(
            (Term("compute", work * small / layout.num_ranks), Term("losses", work * (loss - 1) / layout.num_ranks))
        )

    def tail_seconds(self, query: StageQuery) -> float:
        return self.seconds(query).total / 8

    def memory(self, query: StageQuery) -> Memory:
        layout, schedule = query.layout, query.schedule
        shard = query.model.num_params / (layout.tp * layout.pp)
        resident = [Term("weights", 2 * shard)]
        if query.stage.trains:
            resident.append(Term("optimizer", 12 * shard / layout.dp + 4 * shard))
        rows = schedule.generation_slots or schedule.micro_batch_size
        saved = {Recompute.NONE: 1.0, Recompute.SELECTIVE: 0.6, Recompute.FULL: 0.1}[schedule.recompute]
        tokens = self.facts.workload.prompt.max + self.facts.workload.response.max
        activations = rows * tokens * query.model.hidden_size * query.model.num_layers * 8 * saved / layout.tp
        return Memory(resident=Cost(tuple(resident)), transient=Cost((Term("activations", activations),)))

    def on_layout(self, query: StageQuery) -> LayoutCosts:
        return QueriedLayoutCosts(self, query)

    def refit_seconds(self, move: RefitQuery) -> Cost:
        if move.source == move.target and move.overlap == move.source.num_ranks:
            return Cost()
        return Cost((Term("transfer", move.model.num_params * 2 / 1e9 * (1 if move.overlap else 2)),))

    def transfer_seconds(self, num_bytes: float) -> Cost:
        return Cost((Term("handover", 1e-5 + num_bytes / 1e10),))


@dataclass(frozen=True)
class RandomModel(QueryLoop):
    """Costs drawn from a seed and the question's text, so that equal questions have equal answers.

    A pipeline in chunks holds the weights of the plain one and more activations, and is refit as it is.
    """

    seed: int
    memory_scale: float
    seconds_are_monotone = False

    def lower_bound_seconds(self, stage: Stage, model: ModelSpec, num_ranks: int, part: int) -> float:
        """As seconds are drawn."""
        del stage, model, part
        return 1 / num_ranks**0.7

    def generation_lower_bound(self, query: StageQuery) -> float:
        """As seconds are drawn."""
        return 1 / query.layout.num_ranks**0.7

    def _draw(self, *parts: object) -> float:
        return random.Random(f"{self.seed} {parts}").random()

    def with_row_split(self, query: StageQuery) -> Schedule:
        return query.schedule

    def seconds(self, query: StageQuery) -> Cost:
        share = 1 / query.layout.num_ranks**0.7
        draws = (self._draw("s", i, query.stage.name, query.layout, query.schedule) for i in range(2))
        return Cost(tuple(Term(f"part {i}", (0.5 + draw) * share) for i, draw in enumerate(draws)))

    def tail_seconds(self, query: StageQuery) -> float:
        return self.seconds(query).total * self._draw("tail", query.stage.name, query.layout, query.schedule)

    def memory(self, query: StageQuery) -> Memory:
        plain = replace(query.layout, vpp=1)
        weights = (0.5 + self._draw("w", query.model.name, plain)) / (plain.tp * plain.pp)
        rows = max(query.schedule.micro_batch_size, query.schedule.generation_slots)
        alike = replace(query.schedule, micro_batch_size=1, generation_slots=0)
        other = self._draw("o", query.stage.name, plain, alike) * query.stage.trains
        transient = self._draw("t", query.stage.name, plain, alike) * (1 - 0.5 / rows) * (1.5 - 0.5 / query.layout.vpp)
        scale = self.memory_scale
        return Memory(
            resident=Cost((Term("weights", weights * scale), Term("other", other * scale))),
            transient=Cost((Term("activations", transient * scale),)),
        )

    def on_layout(self, query: StageQuery) -> LayoutCosts:
        return QueriedLayoutCosts(self, query)

    def refit_seconds(self, move: RefitQuery) -> Cost:
        source, target = move.source, move.target
        told = (
            source.num_ranks,
            source.max_overlapping_shards(target),
            target.weight_layout,
            source == target,
            move.overlap,
        )
        return Cost((Term("transfer", 0.2 * self._draw("m", move.model.name, *told)),))

    def transfer_seconds(self, num_bytes: float) -> Cost:
        return Cost((Term("handover", 0.01 * self._draw("h", num_bytes)),))
