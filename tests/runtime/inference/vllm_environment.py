"""The environment with vLLM that `make engines` builds; tests that need it are skipped by name where it is missing."""

from __future__ import annotations

import pytest

from tests.runtime.ranks import ROOT

VLLM_PYTHON = ROOT / "build" / "engines" / "vllm" / "bin" / "python"

needs_vllm = pytest.mark.skipif(
    not VLLM_PYTHON.exists(), reason=f"{VLLM_PYTHON.relative_to(ROOT)} is missing; `make engines` builds it"
)
