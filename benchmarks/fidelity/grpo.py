"""GRPO steps of NeMo-RL whose layouts are stated: on shared ranks in turn, or generation beside training."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from benchmarks.fidelity.assumed import Recipe, assumed
from benchmarks.fidelity.hardware import cluster_of
from benchmarks.fidelity.lengths import cut_lognormal
from benchmarks.fidelity.rows import Row, Skip, count, number
from benchmarks.fidelity.score import Answer
from benchmarks.fidelity.shapes import model_named
from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.cost import Cost, Tally
from meshwright.cost_models.params import fullest_part
from meshwright.cost_models.protocol import StageQuery
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.frameworks import framework_named
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.layout import Layout, layers_per_stage, layout_violations
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Recompute, Schedule
from meshwright.profiles.workload import Workload

_ENGINE, _TRAINER = "vllm-logprobs", "nemo-rl"
_TRAINER_STAGES = ("actor_logprob", "ref_logprob", "actor_train")
_NUM_CALLS = 5
"""Generation, rewards, two log-probabilities, and training."""

_WEIGHT_BYTES = 2
_CONFIG = re.compile(r"gen \[TP,PP\]=\[(\d+),(\d+)\] train \[TP,CP,EP,PP,VPP\]=\[([^\]]+)\]")
_NOTES = re.compile(r"\(samples generated\) (\d+), T-GBS (\d+), max seq (\d+)")
_LAG = re.compile(r"(\d+)-step [Oo]ff")


def grpo_step(_stem: str, row: Row) -> Answer:
    """A synchronous step."""
    if row["mode"] != "sync":
        raise Skip("asynchronous: scored with its synchronous row")
    cost = step_seconds(row)
    label = f"{row['system']} {row['model_actor']} {row['gpu']} x{row['num_gpus']}"
    return Answer(label=label, measured=number(row, "step_time_s"), predicted=cost.total, terms=cost)


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
    and share experts."""

    gpu: str
    model: ModelSpec
    workload: Workload
    num_ranks: int
    generation: Layout
    training: Layout
    recipe: Recipe

    def in_turn(self) -> Cost:
        """Every stage on all ranks, one after the other."""
        share = assumed().nemo_rl.sync_memory_share
        tally = Tally()
        tally.add("generation", self._generation_seconds(self.num_ranks, share, batches_in_flight=1))
        for name, seconds in self._trainer_seconds(self.num_ranks).items():
            tally.add(name, seconds)
        self._add_controller(tally)
        return tally.cost()

    def side_by_side(self, lag: int) -> Cost:
        """Generation of later batches on its own ranks while the others train, and a refit when both are done."""
        nemo = assumed().nemo_rl
        generating = round(nemo.async_generation_share * self.num_ranks)
        generation = self._generation_seconds(generating, nemo.async_memory_share, batches_in_flight=1 + lag)
        trainer = self._trainer_seconds(self.num_ranks - generating)
        tally = Tally()
        for name, seconds in trainer.items():
            tally.add(name, seconds)
        tally.add("wait for generation", max(0.0, generation - sum(trainer.values())))
        self._add_controller(tally)
        return tally.cost()

    def _add_controller(self, tally: Tally) -> None:
        received = _WEIGHT_BYTES * fullest_part(self.model, self.generation.tp, self.generation.pp).num_params
        tally.add("refit", received / assumed().nemo_rl.refit_bytes_per_second)
        tally.add("function calls", _NUM_CALLS * framework_named(_TRAINER).call_seconds)

    def _generation_seconds(self, num_ranks: int, memory_share: float, *, batches_in_flight: int) -> float:
        layout, cluster = _replicated(self.generation, num_ranks), cluster_of(self.gpu, num_ranks)
        rows = batches_in_flight * -(-self.workload.batch_size // layout.dp)
        slots = min(rows, self._cached_rows(cluster, memory_share), framework_named(_ENGINE).max_rows)
        schedule = Schedule(generation_slots=slots, batches_in_flight=batches_in_flight)
        query = StageQuery(
            stage=PPO_GRAPH.by_name["actor_generate"], model=self.model, layout=layout, schedule=schedule
        )
        return self._model(cluster, _ENGINE).seconds(query).total

    def _cached_rows(self, cluster: Cluster, memory_share: float) -> int:
        """Sequences of mean length whose keys and values fit beside the weights: blocks are given out as they grow
        (Kwon et al., vLLM, arXiv:2309.06180)."""
        layout, model = self.generation, self.model
        weights = _WEIGHT_BYTES * fullest_part(model, layout.tp, layout.pp).num_params
        per_token = 2 * _WEIGHT_BYTES * max(layers_per_stage(model, layout.pp)) * model.shard(layout.tp).kv_size
        free = memory_share * cluster.device.memory_bytes - weights
        return max(1, int(free / (per_token * self.workload.mean_tokens)))

    def _trainer_seconds(self, num_ranks: int) -> dict[str, float]:
        """Log-probabilities and updates; sequences are packed to the greatest length, so many rows run together."""
        layout, cluster = _replicated(self.training, num_ranks), cluster_of(self.gpu, num_ranks)
        together = self.workload.max_tokens / self.workload.mean_tokens
        found = {}
        for name in _TRAINER_STAGES:
            stage = PPO_GRAPH.by_name[name]
            rows = max(1, round(together * (1 if stage.trains else self.recipe.forward_rows)))
            recompute = Recompute(self.recipe.recompute) if stage.trains else Recompute.NONE
            schedule = Schedule(micro_batch_size=rows, recompute=recompute)
            query = StageQuery(stage=stage, model=self.model, layout=layout, schedule=schedule)
            found[name.replace("_", " ")] = self._model(cluster, _TRAINER).seconds(query).total
        return found

    def _model(self, cluster: Cluster, framework: str) -> AnalyticModel:
        return AnalyticModel(cluster, self.workload, "bf16", framework=framework_named(framework))


def _replicated(replica: Layout, num_ranks: int) -> Layout:
    dp, rest = divmod(num_ranks, replica.tp * replica.pp * replica.cp)
    if rest or not dp or dp % replica.ep:
        raise Skip("the replicas do not fill the ranks")
    return replace(replica, dp=dp)


def _job_of(row: Row) -> _Job:
    """The layouts that a row states in free text, and lengths that have its mean and its longest."""
    config, notes = _CONFIG.search(row["parallel_config"]), _NOTES.search(row["notes"])
    if config is None or notes is None:
        raise Skip("layouts not stated")
    if row["precision"].upper() != "BF16":
        raise Skip(f"precision {row['precision']} is not priced in training")
    degrees = [int(part) for part in config[3].split(",") if part.strip().isdigit()]
    if len(degrees) < 4:
        raise Skip("layouts not stated")
    tp, cp, ep, pp = degrees[0], degrees[1], degrees[2], degrees[-1] if len(degrees) > 4 else degrees[3]
    nemo, longest = assumed().nemo_rl, int(notes[3])
    drawn = number({"response_len_tok": row["response_len_tok"].partition(" ")[0]}, "response_len_tok")
    mean = drawn - nemo.prompt_tokens
    if not 0 < mean < longest - nemo.prompt_tokens:
        raise Skip("the mean length lies beyond the longest")
    workload = Workload(
        batch_size=int(notes[1]),
        prompt=LengthSpec(max=nemo.prompt_tokens, fixed=nemo.prompt_tokens),
        response=cut_lognormal(mean, longest - nemo.prompt_tokens, nemo.length_tail),
        num_minibatches=int(notes[1]) // int(notes[2]),
    )
    generation, training = (
        Layout(tp=int(config[1]), pp=int(config[2])),
        Layout(tp=tp, pp=pp, sp=tp > 1, cp=cp, dp=ep, ep=ep),
    )
    model = model_named(row["model_actor"])
    if layout_violations(generation, model) or layout_violations(training, model):
        raise Skip("heads, layers or sequences are dealt otherwise than here")
    return _Job(
        gpu=row["gpu"],
        model=model,
        workload=workload,
        num_ranks=count(row, "num_gpus"),
        generation=generation,
        training=training,
        recipe=nemo.recipes.get(row["model_actor"], Recipe()),
    )
