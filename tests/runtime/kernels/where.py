"""Where tests of kernels run: compiled on a GPU, else by Triton's interpreter, with the same numbers, on a CPU."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
