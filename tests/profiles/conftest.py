"""A small job: two shapes, two ranks, a long tail."""

import pytest

from meshwright.profiles.hardware import Cluster, local_cluster
from meshwright.profiles.lengths import LengthSpec
from meshwright.profiles.model_shape import ModelSpec, model_from_config
from meshwright.profiles.stages import Role
from meshwright.profiles.workload import Workload

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}


@pytest.fixture
def specs() -> dict[Role, ModelSpec]:
    scalar = {Role.ACTOR: False, Role.REF: False, Role.CRITIC: True, Role.REWARD: True}
    return {role: model_from_config(CONFIG, name=role.value, scalar_head=head) for role, head in scalar.items()}


@pytest.fixture
def workload() -> Workload:
    return Workload(
        batch_size=32, prompt=LengthSpec(max=16, median=8, p99=16), response=LengthSpec(max=96, median=20, p99=90)
    )


@pytest.fixture
def cluster() -> Cluster:
    return local_cluster(2)
