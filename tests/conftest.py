from __future__ import annotations

import os

import hypothesis
import torch

from tests.tiers import pytest_addoption, pytest_collection_modifyitems, pytest_configure  # noqa: F401

if not torch.cuda.is_available():
    # Triton asks when it is first imported, which megatron does too: its kernels then run on a processor.
    os.environ["TRITON_INTERPRET"] = "1"

# Laws hold on any machine at any speed, and the examples of a run are those of every run.
hypothesis.settings.register_profile("laws", deadline=None, derandomize=True)
hypothesis.settings.load_profile("laws")
