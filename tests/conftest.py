from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Triton asks when it is first imported, which megatron does too: its kernels then run on a processor.
    os.environ["TRITON_INTERPRET"] = "1"
