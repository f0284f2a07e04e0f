"""Images cost what their encoder computes and holds, in every stage that reads prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.cost_models.analytic import AnalyticModel
from meshwright.cost_models.image_costs import IMAGE_ENCODER, image_seconds, prompt_seconds, working_bytes
from meshwright.cost_models.kernels import Kernels
from meshwright.cost_models.protocol import StageQuery
from meshwright.profiles.hardware import Cluster
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_parts.image_encoder import ImageEncoder
from meshwright.profiles.model_shape import ModelSpec
from meshwright.profiles.schedule import Offload
from meshwright.profiles.workload import Images, Workload

ENCODER = ImageEncoder(
    num_blocks=27,
    hidden_size=1152,
    ffn_size=4304,
    num_heads=16,
    output_size=4096,
    patch_elements=1536,
    merge_size=2,
    num_full_blocks=27,
    num_positions=2304,
    num_deepstack=3,
    has_all_biases=True,
)
WINDOWED = replace(ENCODER, num_full_blocks=4, window_patches=64)
STAGES = "actor_generate", "actor_logprob", "ref_logprob", "actor_train"


def lengths(tokens: int) -> LengthSpec:
    return LengthSpec(max=tokens, fixed=tokens)


IMAGES = Images(number=lengths(2), tokens=lengths(1024))
WORKLOAD = Workload(
    batch_size=64, group_size=4, prompt=lengths(2500), response=lengths(100), images=IMAGES, num_minibatches=2
)


@pytest.fixture
def reader(llama: ModelSpec) -> ModelSpec:
    return replace(llama, image_encoder=ENCODER, max_positions=4096)


@pytest.fixture
def costs(a100s: Callable[[int], Cluster]) -> Callable[[Workload], AnalyticModel]:
    return lambda workload: AnalyticModel(a100s(1), workload, "bf16")


def test_a_large_image_takes_the_floating_point_operations_of_its_products_at_a_speed_below_the_peak(
    laws: Kernels, a100s: Callable[[int], Cluster]
) -> None:
    tokens, peak = 4096, a100s(1).device.flops_per_second["bf16"]
    patches = tokens * 4
    linears = 27 * patches * sum(inner * outer for inner, outer in ENCODER.block_linears)
    linears += patches * 1536 * 1152 + tokens * 4 * (4608 * 4608 + 4608 * 4096)
    flops = 2 * linears + 27 * 4 * patches**2 * 1152
    seconds = image_seconds(ENCODER, float(tokens), laws, 2)
    assert 1 < seconds / (flops / peak) < 3


def test_attention_is_quadratic_in_an_image_except_in_windows(laws: Kernels) -> None:
    small, large = (image_seconds(ENCODER, tokens, laws, 2) for tokens in (4096.0, 16384.0))
    windowed = [image_seconds(WINDOWED, tokens, laws, 2) for tokens in (4096.0, 16384.0)]
    assert large > 5 * small
    assert windowed[1] / windowed[0] < large / small
    assert windowed[0] < small


def test_an_image_costs_alone_what_it_costs_among_several(laws: Kernels) -> None:
    counts = np.array([4.0, 16.0, 64.0, 100.0, 1024.0, 5000.0])
    for encoder in (ENCODER, WINDOWED):
        together = image_seconds(encoder, counts, laws, 2)
        alone = [image_seconds(encoder, float(one), laws, 2) for one in counts]
        np.testing.assert_allclose(together, alone, rtol=1e-12, atol=0)
        held = working_bytes(encoder, IMAGES, counts, 2)
        np.testing.assert_allclose(held, [working_bytes(encoder, IMAGES, float(one), 2) for one in counts], rtol=1e-12)


def test_a_prompt_takes_the_mean_over_the_sizes_of_its_images(laws: Kernels) -> None:
    sizes = LengthSpec(max=2000, histogram=((100, 3.0), (2000, 1.0)))
    images = Images(number=LengthSpec(max=4, histogram=((1, 1.0), (4, 1.0))), tokens=sizes)
    one, other = (image_seconds(ENCODER, tokens, laws, 2) for tokens in (100.0, 2000.0))
    assert prompt_seconds(ENCODER, images, laws, 2) == pytest.approx(2.5 * (0.75 * one + 0.25 * other))


@pytest.mark.parametrize("layout", ["tp1", "tp2,dp2", "tp4,pp2"])
def test_every_row_is_encoded_once_in_a_pass_and_every_prompt_once_in_generation(
    reader: ModelSpec,
    query: Callable[..., StageQuery],
    costs: Callable[[Workload], AnalyticModel],
    laws: Kernels,
    layout: str,
) -> None:
    each = prompt_seconds(ENCODER, IMAGES, laws, 2)
    for stage in STAGES:
        question = query(stage, layout, slots=16 if stage == "actor_generate" else 0, model=reader)
        num_rows = 64 / question.layout.dp / (4 if stage == "actor_generate" else 1)
        found = costs(WORKLOAD).seconds(question).amount(IMAGE_ENCODER)
        assert found / num_rows == pytest.approx(each, rel=0.2), stage
        passes = costs(WORKLOAD.model_copy(update={"num_epochs": 2})).seconds(question).amount(IMAGE_ENCODER)
        assert passes == pytest.approx(found * (2 if stage == "actor_train" else 1))


def test_images_are_costed_once_for_all_layouts_and_schedules_of_a_model(
    reader: ModelSpec,
    query: Callable[..., StageQuery],
    costs: Callable[[Workload], AnalyticModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[ImageEncoder] = []

    def counted(encoder: ImageEncoder, *rest: Any) -> float:
        asked.append(encoder)
        return prompt_seconds(encoder, *rest)

    monkeypatch.setattr("meshwright.cost_models.compute.prompt_seconds", counted)
    model, found = costs(WORKLOAD), set[float]()
    for layout in ("tp1", "tp2", "tp2,sp", "tp4,pp2"):
        for size in (1, 2, 4):
            question = query("ref_logprob", layout, size, model=reader)
            found.add(round(model.seconds(question).amount(IMAGE_ENCODER), 12))
            alone = costs(WORKLOAD).seconds(question).amount(IMAGE_ENCODER)
            assert model.seconds(question).amount(IMAGE_ENCODER) == alone
    assert len(found) == 1
    assert len(asked) == 1 + 4 * 3  # of the shared model once


def test_text_alone_is_not_encoded_and_only_weights_are_held(
    reader: ModelSpec, llama: ModelSpec, query: Callable[..., StageQuery], costs: Callable[[Workload], AnalyticModel]
) -> None:
    text = WORKLOAD.model_copy(update={"images": None})
    for stage in STAGES:
        question = query(stage, "tp2", slots=16 if stage == "actor_generate" else 0, model=reader)
        of_text = replace(question, model=replace(llama, max_positions=4096))
        assert costs(text).seconds(question) == costs(text).seconds(of_text)
        assert costs(WORKLOAD).seconds(of_text) == costs(text).seconds(of_text)
        held, without = (costs(text).memory(each).resident for each in (question, of_text))
        assert held.total - without.total == pytest.approx(2 * ENCODER.num_params)
        assert held.amount("weights") - without.amount("weights") == pytest.approx(2 * ENCODER.num_params)


def test_a_frozen_encoder_has_no_gradients_and_what_is_alive_while_it_runs_is_named(
    reader: ModelSpec, query: Callable[..., StageQuery], costs: Callable[[Workload], AnalyticModel]
) -> None:
    for stage in STAGES:
        question = query(stage, "tp2", slots=64 if stage == "actor_generate" else 0, model=reader)
        memory = costs(WORKLOAD).memory(question)
        if stage != "actor_logprob":  # the weights that arrive in its refit need more
            assert memory.transient.amount(IMAGE_ENCODER) > 1024 * 4 * 1152 * 2
        without = costs(WORKLOAD).memory(replace(question, model=replace(reader, image_encoder=None)))
        for name in ("gradients", "moments", "main weights", "activations"):
            assert memory.resident.amount(name) == without.resident.amount(name)
            assert memory.transient.amount(name) == without.transient.amount(name)


def test_offloaded_weights_include_those_of_the_encoder(
    reader: ModelSpec, query: Callable[..., StageQuery], costs: Callable[[Workload], AnalyticModel]
) -> None:
    question = query("ref_logprob", "tp2", model=reader, offload=Offload.WEIGHTS)
    without = replace(question, model=replace(reader, image_encoder=None))
    hosts = [costs(WORKLOAD).memory(each).host_bytes for each in (question, without)]
    assert hosts[0] - hosts[1] == pytest.approx(2 * ENCODER.num_params, rel=1e-6)
    assert costs(WORKLOAD).memory(question).resident.amount("weights") == 0
