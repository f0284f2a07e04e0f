"""GRPO steps of NeMo-RL whose layouts are stated: on shared ranks in turn, or generation beside training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.fidelity.assumed import Recipe, assumed
from benchmarks.fidelity.hardware import cluster_of
from benchmarks.fidelity.intervals import UNSHIFTED, Doubt, Shift
from benchmarks.fidelity.lengths import cut_lognormal
from benchmarks.fidelity.rows import Row, Skip, count, number
from benchmarks.fidelity.score import Answer
from benchmarks.fidelity.shapes import model_named, shape_key, with_repeated_keys
from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.communication import num_whole_tensors
from meshwright.cost_models.cost import Cost, Tally
from meshwright.cost_models.micro_batches import capped_micro_batches
from meshwright.cost_models.params import fullest_part
from meshwright.cost_models.protocol import StageQuery
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.frameworks import engine_named, framework_named
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout, layers_per_stage, layout_violations
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Recompute, Schedule
from meshwright.profiles.stages import Role, Stage
from meshwright.profiles.workload import Workload

_ENGINE, _TRAINER, _SHARDING_TRAINER = "vllm-logprobs", "nemo-rl", "nemo-rl-dtensor"
_TRAINER_STAGES = ("actor_logprob", "ref_logprob", "actor_train")
_NUM_CALLS = 5
"""Generation, rewards, two log-probabilities, and training."""

_STAGES = {"gen_s": ("generation",), "infer_logprob_s": ("actor logprob", "ref logprob"), "train_s": ("actor train",)}
"""Columns with the seconds of a stage, and the names of the terms that it consists of."""

_STAGE = "stage"
"""Column of the stage that a row is asked for."""

_WEIGHT_BYTES = 2

_SWAP_COPIES = 3
"""Copies of a rank's weights for the log-probabilities of the reference (use_reference_model in
models/policy/megatron_policy_worker.py)."""

_PCIE_BYTES_PER_SECOND = 128.0e9
"""The fastest PCIe link, one direction (6.0 x16); a faster host link is NVLink-C2C."""

_CONFIG = re.compile(r"gen \[TP,PP\]=\[(\d+),(\d+)\] train \[TP,CP,EP,PP,VPP\]=\[([^\]]+)\]")
_PROSE = re.compile(r"(DTensor|Megatron)(?: \(FSDP2\))?((?: (?:TP|EP|PP|CP)\d+| SP)*); gen TP(\d+)")
_DEGREE = re.compile(r"(TP|EP|PP|CP)(\d+)")
_GENERATED = re.compile(r"(?:samples generated\)|rollout batch) (\d+)")
_TRAINED = re.compile(r"(?:T-GBS|train batch) (\d+)")
_LONGEST = re.compile(r"max seq (\d+)")
_LENGTH = re.compile(r"~?(\d+)")
_POOLS = re.compile(r"generation (\d+) GPUs, training (\d+) GPUs")
_SHARE = re.compile(r"vLLM memory share ([\d.]+)")
_RELEASE = re.compile(r"v(\d+)\.(\d+)")
_LAG = re.compile(r"(\d+)-step [Oo]ff")


def grpo_step(_stem: str, row: Row) -> Answer:
    """A synchronous step."""
    if row["mode"] != "sync":
        raise Skip("asynchronous: scored with its synchronous row")
    job = _job_of(row)
    cost = job.in_turn()
    return Answer(
        label=f"{row['system']} {row['model_actor']} {row['gpu']} x{row['num_gpus']}",
        measured=number(row, "step_time_s"),
        predicted=cost.total,
        terms=cost,
        ask=lambda shift: replace(job, shift=shift).in_turn().total,
        doubt=job.doubt,
    )


def by_stage(rows: Iterable[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
    """Each row once for each of its stages that is published."""
    for stem, row in rows:
        for column in _STAGES:
            if row.get(column):
                yield stem, {**row, _STAGE: column}


def grpo_stage(_stem: str, row: Row) -> Answer:
    """One stage of a synchronous step."""
    if row["mode"] != "sync":
        raise Skip("asynchronous: its stages wait for each other")
    if "GENERATION CRIPPLED" in row["notes"] and row[_STAGE] == "gen_s":
        raise Skip("generation without graphs and custom kernels, as its notes say")
    job, names = _job_of(row), _STAGES[row[_STAGE]]
    return Answer(
        label=f"{row['system']} {row['model_actor']} {row['gpu']} x{row['num_gpus']} {row[_STAGE]}",
        measured=number(row, row[_STAGE]),
        predicted=job.stage_seconds(names),
        ask=lambda shift: replace(job, shift=shift).stage_seconds(names),
        doubt=job.doubt,
    )


def unread_step(_stem: str, row: Row) -> Answer:
    """No answer: a step of a system whose layouts this project does not read, with the reason."""
    if not row["model_actor"] or row["model_actor"].startswith("not stated"):
        raise Skip("model not published")
    if not row["parallel_config"]:
        raise Skip("layouts not published")
    raise Skip(f"layouts of {row['system']} are free text, or its sharding and micro-batches are not published")


def step_seconds(row: Row) -> Cost:
    """Seconds of a step, by stage; of an asynchronous one what its slower pool takes, and the refit between."""
    job, lag = _job_of(row), _LAG.match(row["mode"])
    if row["mode"] == "sync":
        return job.in_turn()
    if lag is None:
        raise Skip(f"mode {row['mode']} is not known")
    return job.side_by_side(int(lag[1]))


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A model and its workload on `num_ranks`, with the layout of one replica that generates and of those that train
    and share experts, and what the recipe says besides.

    `generating` are the ranks of an asynchronous job that generate; `layers_are_sharded` is FSDP.
    """

    gpu: str
    model: ModelSpec
    workload: Workload
    num_ranks: int
    generating: int
    generation: Layout
    training: Layout
    recipe: Recipe
    memory_share: float
    layers_are_sharded: bool
    skips_logprob: bool
    shift: Shift = UNSHIFTED

    @property
    def doubt(self) -> Doubt:
        """What makes its seconds uncertain besides the rates of the machine."""
        return Doubt(
            device=cluster_of(self.gpu, 1).device.name,
            has_experts=self.model.experts is not None,
            lengths_differ=True,
            shards_weights=self.layers_are_sharded,
            is_of_other_trainer=True,
        )

    def in_turn(self) -> Cost:
        """Every stage on all ranks, one after the other."""
        tally = Tally()
        tally.add("generation", self._generation_seconds(self.num_ranks, batches_in_flight=1))
        for name in self._trainer_stages:
            tally.add(name.replace("_", " "), self._trainer_seconds(name, self.num_ranks))
        self._add_controller(tally, assumed().nemo_rl.refit_tensor_seconds)
        return tally.cost()

    def stage_seconds(self, names: Sequence[str]) -> float:
        """The stages of these terms on all ranks."""
        if "generation" in names:
            return self._generation_seconds(self.num_ranks, batches_in_flight=1)
        stages = [name for name in self._trainer_stages if name.replace("_", " ") in names]
        return sum(self._trainer_seconds(name, self.num_ranks) for name in stages)

    def side_by_side(self, lag: int) -> Cost:
        """Generation of later batches on its own ranks while the others train, and a refit when both are done."""
        generation = self._generation_seconds(self.generating, batches_in_flight=1 + lag)
        training = self.num_ranks - self.generating
        trainer = {name: self._trainer_seconds(name, training) for name in self._trainer_stages}
        tally = Tally()
        for name, seconds in trainer.items():
            tally.add(name.replace("_", " "), seconds)
        tally.add("wait for generation", max(0.0, generation - sum(trainer.values())))
        self._add_controller(tally, engine_named("vllm").refit.tensor_seconds)
        return tally.cost()

    @property
    def _trainer_stages(self) -> tuple[str, ...]:
        return _TRAINER_STAGES[1:] if self.skips_logprob else _TRAINER_STAGES

    def _add_controller(self, tally: Tally, tensor_seconds: float) -> None:
        model = with_repeated_keys(self.model, self.generation.tp)
        received = _WEIGHT_BYTES * fullest_part(model, self.generation.tp, self.generation.pp).num_params
        tensors = num_whole_tensors(self.model) * tensor_seconds
        tally.add("refit", received / assumed().nemo_rl.refit_bytes_per_second + tensors)
        tally.add("function calls", _NUM_CALLS * framework_named(_TRAINER).call_seconds)

    def _generation_seconds(self, num_ranks: int, *, batches_in_flight: int) -> float:
        model = with_repeated_keys(self.model, self.generation.tp)
        _require_legal(self.generation, model)
        layout, cluster = _replicated(self.generation, num_ranks), cluster_of(self.gpu, num_ranks)
        rows = batches_in_flight * -(-self.workload.batch_size // layout.dp)
        slots = min(rows, self._cached_rows(cluster, model), framework_named(_ENGINE).max_rows)
        schedule = Schedule(generation_slots=slots, batches_in_flight=batches_in_flight)
        query = StageQuery(stage=PPO_GRAPH.by_name["actor_generate"], model=model, layout=layout, schedule=schedule)
        return self._model(cluster, _ENGINE, self.workload).seconds(query).total

    def _cached_rows(self, cluster: Cluster, model: ModelSpec) -> int:
        """Sequences of mean length whose keys and values fit beside the weights: blocks are given out as they grow
        (Kwon et al., vLLM, arXiv:2309.06180)."""
        layout = self.generation
        weights = _WEIGHT_BYTES * fullest_part(model, layout.tp, layout.pp).num_params
        cached = model.shard(layout.tp).cached_elements
        per_token = _WEIGHT_BYTES * max(layers_per_stage(model, layout.pp)) * cached
        free = self.memory_share * cluster.device.memory_bytes - weights
        return max(1, int(free / (per_token * self.workload.mean_tokens)))

    def _trainer_seconds(self, name: str, num_ranks: int) -> float:
        """Seconds of a pass of log-probabilities or the updates; the reference replaces the actor for its pass."""
        _require_legal(self.training, self.model)
        layout, cluster = _replicated(self.training, num_ranks), cluster_of(self.gpu, num_ranks)
        stage = PPO_GRAPH.by_name[name]
        workload, max_tokens = self._packed(stage, layout)
        recompute = Recompute(self.recipe.recompute) if stage.trains else Recompute.NONE
        schedule = Schedule(micro_batch_size=0, micro_batch_tokens=max_tokens, recompute=recompute)
        query = StageQuery(stage=stage, model=self.model, layout=layout, schedule=schedule)
        trainer = _SHARDING_TRAINER if self.layers_are_sharded else _TRAINER
        seconds = self._model(cluster, trainer, workload).seconds(query).total
        return seconds + (self._swap_seconds(cluster, layout) if stage.role is Role.REF else 0.0)

    def _packed(self, stage: Stage, layout: Layout) -> tuple[Workload, int]:
        """The sequences of a stage, and the most tokens of a micro-batch, into which they are packed.

        Pipeline stages exchange tensors of one size, for which each micro-batch is padded (NeMo-RL,
        models/policy/megatron_policy_worker.py, pad_full_seq_to).
        """
        workload = self.workload
        max_tokens = workload.max_tokens * (1 if stage.trains else self.recipe.forward_rows)
        if layout.pp == 1:
            return workload, max_tokens
        minibatches = workload.num_minibatches if stage.trains else 1
        rows = -(-workload.batch_size // (layout.dp * minibatches))
        packed = capped_micro_batches(workload.sequence_lengths, rows, max_tokens)
        number = max(1, round(sum(batch.number for batch in packed)))
        together = max(1, round(rows / number))
        response = max_tokens // together - workload.prompt.max
        update = {
            "batch_size": number * together * layout.dp * minibatches,
            "response": LengthSpec(max=response, fixed=response),
        }
        return workload.model_copy(update=update), max_tokens

    def _swap_seconds(self, cluster: Cluster, layout: Layout) -> float:
        """Seconds in which the actor's weights go to the host, and those of the reference, then the actor's, come back.

        Megatron's worker copies through memory that is not pinned. FSDP's worker pins it, and hosts behind NVLink-C2C
        need no pinning.
        """
        if self.layers_are_sharded or cluster.host.bytes_per_second > _PCIE_BYTES_PER_SECOND:
            return 0.0
        part = fullest_part(self.model, layout.tp, layout.pp, self.training.expert_replicas)
        return _SWAP_COPIES * _WEIGHT_BYTES * part.num_params / assumed().nemo_rl.unpinned_bytes_per_second

    def _model(self, cluster: Cluster, framework: str, workload: Workload) -> AnalyticModel:
        shifted = self.shift.framework(framework_named(framework))
        return AnalyticModel(self.shift.cluster(cluster), workload, "bf16", framework=shifted)


def _require_legal(layout: Layout, model: ModelSpec) -> None:
    """Skips a layout that this cost model does not have; experts beside context-parallel ranks are costed as if the
    latter were not there."""
    if layout_violations(replace(layout, cp=1), model):
        raise Skip("heads, layers or sequences are dealt otherwise than here")


def _replicated(replica: Layout, num_ranks: int) -> Layout:
    """The layout on so many ranks. Experts that are divided over context-parallel ranks too are taken to be divided
    over the others alone, which computes and sends as much."""
    dp, rest = divmod(num_ranks, replica.tp * replica.pp * replica.cp)
    if rest or not dp:
        raise Skip("the replicas do not fill the ranks")
    if dp >= replica.expert_replicas:
        if dp % replica.expert_replicas:
            raise Skip("the replicas do not fill the ranks")
        return replace(replica, dp=dp)
    if replica.cp == 1:
        raise Skip("the replicas do not fill the ranks")
    return replace(replica, dp=dp, ep=dp * replica.fold_size)


class _Stated(NamedTuple):
    """Layouts as a row states them in free text."""

    generation: Layout
    training: Layout
    layers_are_sharded: bool


def _layouts_of(text: str) -> _Stated:
    """The layouts of a row; experts are whole on their ranks (NeMo-RL's expert_tensor_parallel_size is 1)."""
    if config := _CONFIG.search(text):
        degrees = [int(part) for part in config[3].split(",") if part.strip().isdigit()]
        if len(degrees) < 4:
            raise Skip("layouts not stated")
        tp, cp, ep, pp = degrees[0], degrees[1], degrees[2], degrees[-1] if len(degrees) > 4 else degrees[3]
        return _Stated(Layout(tp=int(config[1]), pp=int(config[2])), _training_layout(tp, cp, ep, pp), False)
    if prose := _PROSE.search(text):
        degree = {name: int(value) for name, value in _DEGREE.findall(prose[2])}
        training = _training_layout(*(degree.get(name, 1) for name in ("TP", "CP", "EP", "PP")))
        return _Stated(Layout(tp=int(prose[3])), training, prose[1] == "DTensor")
    raise Skip("layouts not stated")


def _training_layout(tp: int, cp: int, ep: int, pp: int) -> Layout:
    if ep == 1:
        return Layout(tp=tp, pp=pp, sp=tp > 1, cp=cp)
    if ep % tp:
        raise Skip("experts are divided otherwise than here")
    return Layout(tp=tp, pp=pp, sp=tp > 1, cp=cp, dp=ep // tp, ep=ep, etp=1)


def _job_of(row: Row) -> _Job:
    """The layouts that a row states in free text, and lengths that have its mean and its longest."""
    stated, notes, nemo = _layouts_of(row["parallel_config"]), row["notes"], assumed().nemo_rl
    if row["precision"].upper() != "BF16":
        raise Skip(f"precision {row['precision']} is not priced in training")
    longest, length = _LONGEST.search(notes), _LENGTH.match(row["response_len_tok"])
    if longest is None or length is None:
        raise Skip("lengths not stated")
    generated, trained = _GENERATED.search(notes), _TRAINED.search(notes)
    batch_size = int(generated[1]) if generated else count(row, "batch_prompts") * count(row, "samples_per_prompt")
    max_response, mean = int(longest[1]) - nemo.prompt_tokens, int(length[1])
    if not 0 < mean < max_response:
        raise Skip("the mean length lies beyond the longest")
    workload = Workload(
        batch_size=batch_size,
        prompt=LengthSpec(max=nemo.prompt_tokens, fixed=nemo.prompt_tokens),
        response=cut_lognormal(mean, max_response, nemo.length_tail),
        num_minibatches=batch_size // int(trained[1]) if trained else 1,
    )
    num_ranks, pools, share = count(row, "num_gpus"), _POOLS.search(notes), _SHARE.search(notes)
    default_share = nemo.sync_memory_share if row["mode"] == "sync" else nemo.async_memory_share
    return _Job(
        gpu="H100" if "H100 presumed" in row["gpu"] else row["gpu"],
        model=model_named(row["model_actor"]),
        workload=workload,
        num_ranks=num_ranks,
        generating=int(pools[1]) if pools else round(nemo.async_generation_share * num_ranks),
        generation=stated.generation,
        training=stated.training,
        recipe=_recipe_of(row),
        memory_share=float(share[1]) if share else default_share,
        layers_are_sharded=stated.layers_are_sharded,
        skips_logprob=_skips_logprob(row),
    )


def _recipe_of(row: Row) -> Recipe:
    """The recipe of a model, and whether activations are recomputed where the row says so."""
    recipe = assumed().nemo_rl.recipes.get(shape_key(row["model_actor"]), Recipe())
    if "activation checkpointing" not in row["notes"]:
        return recipe
    return recipe.model_copy(update={"recompute": "none" if "no activation checkpointing" in row["notes"] else "full"})


def _skips_logprob(row: Row) -> bool:
    """Whether the release trains on policy without computing the previous log-probabilities again."""
    release, first = _RELEASE.search(row["system"]), assumed().nemo_rl.skips_logprob_since
    is_late = (int(release[1]), int(release[2])) >= first if release else "main" in row["system"]
    return is_late or "previous log-probs skipped" in row["notes"]
