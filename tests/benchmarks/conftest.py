"""Benchmarks launch ranks as the runtime's tests do, and are asked about the devices of the cost models' tests."""

from tests.cost_models.conftest import a100s, llama
from tests.runtime.conftest import fork_server

__all__ = ["a100s", "fork_server", "llama"]
