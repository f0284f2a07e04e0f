"""Benchmarks launch ranks as the runtime's tests do."""

from tests.runtime.conftest import fork_server

__all__ = ["fork_server"]
