"""Which machine may be profiled for which job."""

from __future__ import annotations

import pytest

from meshwright.planner.plan.job import Facts
from meshwright.profiles.devices import device_named
from meshwright.profiles.errors import BadInput
from meshwright.runtime.profiling.profiling import require_device
from tests.planner.jobs import small_facts

H200 = "NVIDIA H200"


def facts_of(name: str) -> Facts:
    facts = small_facts()
    device = device_named(name)[0]
    return facts.model_copy(update={"cluster": facts.cluster.model_copy(update={"device": device})})


@pytest.mark.parametrize(
    ("name", "cuda_name"),
    [
        ("h200", H200),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB"),
        ("h100-pcie", "NVIDIA H100 PCIe"),
        ("rtx-4090", "NVIDIA GeForce RTX 4090"),
        ("rtx-6000-pro", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
        ("mi300x", "AMD Instinct MI300X"),
    ],
)
def test_a_device_is_known_by_its_model_number(name: str, cuda_name: str) -> None:
    require_device(facts_of(name), None, cuda_name)
    require_device(facts_of(name), "cuda", cuda_name)


@pytest.mark.parametrize(("name", "cuda_name"), [("b200", "NVIDIA GB200"), ("a100-80gb", H200), ("l4", "NVIDIA L40S")])
def test_another_device_than_the_clusters_is_not_timed(name: str, cuda_name: str) -> None:
    with pytest.raises(BadInput, match=f"this machine has '{cuda_name}' and the job's cluster has '{name}'"):
        require_device(facts_of(name), None, cuda_name)


def test_a_typed_device_may_be_called_anything() -> None:
    facts = facts_of("h200")
    device = facts.cluster.device.model_copy(update={"name": "ours"})
    require_device(
        facts.model_copy(update={"cluster": facts.cluster.model_copy(update={"device": device})}), None, H200
    )


def test_a_machine_without_cuda_is_told_in_one_sentence() -> None:
    with pytest.raises(BadInput, match="this machine has no CUDA device and the job's cluster has 'h200'"):
        require_device(facts_of("h200"), "cuda", None)


@pytest.mark.parametrize(("kind", "facts"), [("cpu", facts_of("h200")), ("cuda", small_facts())])
def test_a_kind_of_device_that_the_cluster_does_not_have_is_refused(kind: str, facts: Facts) -> None:
    with pytest.raises(BadInput, match=rf"--device {kind}: the job's cluster has .* leave --device out\."):
        require_device(facts, kind, H200)


def test_a_cpu_is_timed_where_there_is_a_cuda_device_too() -> None:
    require_device(small_facts(), "cpu", H200)
