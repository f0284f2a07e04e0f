"""What the CPU allocator of torch hands out in a pass is what the cost model counts for it, term by term."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.memory_cost import KEPT_LOGIT_BYTES
from meshwright.cost_models.protocol import StageQuery
from meshwright.profiles.algorithms import PPO_GRAPH
from meshwright.profiles.hardware import local_cluster
from meshwright.profiles.layout import Layout
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.schedule import Schedule
from meshwright.profiles.table import Point, Shape, TimedPass
from meshwright.profiles.workload import Workload
from meshwright.runtime.device.instruments import instruments
from meshwright.runtime.model.logprobs import token_logprobs
from meshwright.runtime.model.mesh import build_mesh
from meshwright.runtime.profiling.bench import Bench
from tests.runtime.ranks import run_on_ranks

ROWS, TOKENS, LAYERS = 16, 128, 4
KEPT_ROWS, KEPT_VOCABULARY = 256, 1000
LEAST, MOST = 0.99, 1.7
"""Of an allocated peak, that the terms may be: positions and masks are not counted, and logits and layers are added,
though a pass does not hold all of both at a time."""


LANGUAGE = Shape(
    hidden_size=128,
    ffn_size=352,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_rows=320,
    scalar_head=False,
    tied_embeddings=False,
)
SCALAR = LANGUAGE.model_copy(update={"scalar_head": True})
"""The shapes of the models of examples/tiny."""


def allocated_bytes(body: TimedPass, shape: Shape) -> float:
    """The most bytes that one pass allocates at a time, outside of what it begins with."""
    torch.set_num_threads(1)
    bench = Bench(build_mesh(Layout(), 0), instruments(), precision="fp32", max_positions=2 * TOKENS)
    point = Point(shape=shape, num_layers=LAYERS, timed_pass=body, rows=ROWS, tokens=TOKENS, context=0)
    return most_allocated(bench.prepare(point))


def most_allocated(timed_pass: Callable[[], object]) -> float:
    """The most bytes that a function allocates at a time, outside of what it begins with."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        timed_pass()
    events = [*recorded.profiler.kineto_results.experimental_event_tree()]
    sizes = []
    while events:
        event = events.pop()
        events += event.children
        if event.name == "[memory]":
            sizes.append((event.start_time_ns, event.typed[1].alloc_size))
    held = most = 0
    for _, size in sorted(sizes, key=lambda pair: pair[0]):
        held += size
        most = max(most, held)
    return float(most)


def allocated_by_masks(num_kept: int) -> tuple[float, float]:
    """The most bytes that log-probabilities and entropies over sampling masks allocate: forward, and both ways without
    the gradient of the logits."""
    torch.set_num_threads(1)
    group = build_mesh(Layout(), 0).groups.tp
    logits = torch.randn(KEPT_ROWS, 1, KEPT_VOCABULARY, requires_grad=True)
    kept = torch.stack([torch.randperm(KEPT_VOCABULARY)[:num_kept] for _ in range(KEPT_ROWS)]).int().unsqueeze(0)
    targets = kept[..., 0].long()

    def forward() -> tuple[torch.Tensor, torch.Tensor | None]:
        return token_logprobs(logits, targets, group, vocab_size=KEPT_VOCABULARY, with_entropy=True, kept=kept.long())

    def both_ways() -> None:
        logprobs, entropies = forward()
        assert entropies is not None
        (logprobs + entropies).sum().backward()  # type: ignore[no-untyped-call]

    with torch.no_grad():
        once = most_allocated(forward)
    return once, most_allocated(both_ways) - logits.nbytes


def counted_bytes(stage: str, shape: Shape) -> float:
    """What a plan has for the same pass."""
    fixed = LengthSpec(max=TOKENS // 2, fixed=TOKENS // 2)
    workload = Workload(batch_size=ROWS, prompt=fixed, response=fixed)
    model = shape.model(num_layers=LAYERS, max_positions=2 * TOKENS)
    query = StageQuery(
        stage=PPO_GRAPH.by_name[stage], model=model, layout=Layout(), schedule=Schedule(micro_batch_size=ROWS)
    )
    return AnalyticModel(local_cluster(1), workload, "fp32").memory(query).transient.total


@pytest.mark.check_all
@pytest.mark.parametrize(
    ("stage", "body", "shape"),
    [
        ("ref_logprob", TimedPass.FORWARD, LANGUAGE),
        ("critic_value", TimedPass.FORWARD, SCALAR),
        ("actor_train", TimedPass.TRAIN, LANGUAGE),
        ("critic_train", TimedPass.TRAIN, SCALAR),
    ],
)
def test_a_pass_allocates_no_more_than_is_counted_for_it(stage: str, body: TimedPass, shape: Shape) -> None:
    """A forward pass of a critic was counted as 57 % of what it allocates, its training as 67 %."""
    [allocated] = run_on_ranks(1, allocated_bytes, body, shape)
    counted = counted_bytes(stage, shape)
    assert LEAST * allocated <= counted <= MOST * allocated


@pytest.mark.check_all
@pytest.mark.parametrize("num_kept", [64, 256])
def test_sampling_masks_allocate_no_more_than_is_counted_for_them(num_kept: int) -> None:
    [allocated] = run_on_ranks(1, allocated_by_masks, num_kept)
    counted = KEPT_ROWS * num_kept * KEPT_LOGIT_BYTES
    for each in allocated:
        assert LEAST * each <= counted <= MOST * each
