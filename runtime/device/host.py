"""Where the tensors live, and what lets megatron-core run on the CPU.

The plan says what a process computes on, and `choose` is told once; whether there is a GPU decides nothing. A process
on the CPU sees no GPU, and megatron-core, which names CUDA in some two hundred places and needs it in none of those
reached here, gets a `torch` of its own whose factories and `torch.cuda` answer with the CPU. `torch` itself is left as
it is, so nothing outside megatron-core sees or pays for the stand-in. In a process on CUDA nothing is replaced.

This is the only file that knows of the stand-in, and that asks torch for CUDA. Each workaround carries the lines of
megatron-core it answers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.profiles.errors import BadInput

_MODULES = (
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.resharding.refit",
    "megatron.core.transformer.moe.token_dispatcher",
)
"""The modules of megatron-core that the runtime uses; importing them loads all the others it reaches."""

_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "full",
    "full_like",
    "ones",
    "ones_like",
    "rand",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


_CPU = torch.device("cpu")
_chosen = _CPU
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def choose(kind: str, index: int = 0) -> None:
    """This process computes on the CPU, as it does before any choice, or on the CUDA device of this index.

    Raises BadInput where there is no such device.
    """
    global _chosen  # noqa: PLW0603 - a process has one device
    if kind == "cpu":
        os.environ[_VISIBLE] = ""  # torch asks in places of its own whether there is CUDA
        _chosen = _CPU
        return
    if num_cuda_devices() <= index:
        raise BadInput(
            f"the plan computes on CUDA device {index} of this machine, which has {num_cuda_devices()}; run it on such "
            "a machine, or plan the job for `cluster: local`."
        )
    torch.cuda.set_device(index)
    _chosen = torch.device("cuda", index)


def device() -> torch.device:
    """Where the tensors of this process live."""
    return _chosen


def on_cuda() -> bool:
    """Whether this process computes on a CUDA device."""
    return _chosen.type == "cuda"


def backend() -> str:
    """The collective library for tensors on `device()`."""
    return "nccl" if on_cuda() else "gloo"


def num_cuda_devices() -> int:
    """How many this machine has, whatever this process computes on."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def synchronise() -> None:
    """Waits until the device has done everything asked of it."""
    if on_cuda():
        torch.cuda.synchronize()


def install() -> None:
    """Makes megatron-core run on the device of this process; without effect beyond imports where that is CUDA.

    May be called any number of times: a later call covers what was imported since.
    """
    # Megatron overlaps communication by launching kernels in this order, and says so with a warning otherwise.
    # https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/tensor_parallel/layers.py
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name in _MODULES:
        importlib.import_module(name)
    if on_cuda():
        return
    _take_cpu_generator_for_cuda()
    _answer_tensor_methods()
    _count_routed_tokens_on_host()
    # The literal device "cuda" and torch.cuda.current_device(), for example
    # https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/pipeline_parallel/schedules.py#L596
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = _torch_for_megatron()


@functools.cache
def _torch_for_megatron() -> ModuleType:
    """A copy of the `torch` namespace in which "cuda" means the CPU."""
    stand_in = _copy_of(torch)
    for name in _FACTORIES:
        setattr(stand_in, name, _made_on_host(getattr(torch, name)))
    vars(stand_in)["cuda"] = _cuda_for_megatron()
    vars(stand_in)["distributed"] = _copy_of(torch.distributed)
    vars(stand_in.distributed)["all_gather"] = _all_gather
    return stand_in


def _all_gather(outputs: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
    """Gathers tensors whose first dimensions may differ, which gloo does not: they are padded to the longest.

    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/tensor_parallel/mappings.py#L150
    """
    if len(outputs) == 1:
        outputs[0].copy_(mine)
        return
    longest = max(len(output) for output in outputs)
    padded = mine.new_zeros(longest, *mine.shape[1:])
    padded[: len(mine)] = mine
    gathered = [torch.empty_like(padded) for _ in outputs]
    torch.distributed.all_gather(gathered, padded, group=group)
    for output, part in zip(outputs, gathered, strict=True):
        output.copy_(part[: len(output)])


def _cuda_for_megatron() -> ModuleType:
    """A copy of the `torch.cuda` namespace that answers for the CPU."""
    stand_in = _copy_of(torch.cuda)
    answers: dict[str, Any] = {
        "is_available": lambda: False,
        "is_initialized": lambda: False,
        "device_count": lambda: 0,
        "current_device": device,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        # Device random state, asked for when weights are initialised and when activations are recomputed:
        # https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/tensor_parallel/random.py#L235
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "manual_seed": torch.manual_seed,
        # https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/distributed/param_and_grad_buffer.py#L417
        "Stream": _NoStream,
        "current_stream": _NoStream,
        "default_stream": _NoStream,
        "stream": lambda _: contextlib.nullcontext(),
    }
    vars(stand_in).update(answers)
    return stand_in


def _copy_of(module: ModuleType) -> ModuleType:
    copy = ModuleType(module.__name__, module.__doc__)
    vars(copy).update(vars(module))
    return copy


def _made_on_host(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == "cuda":
            kwargs["device"] = device()
        return factory(*args, **kwargs)

    return made


class _NoStream:
    """A stream on which everything has already happened, and an event on it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self) -> _NoStream:
        return self

    def wait_stream(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...


def _take_cpu_generator_for_cuda() -> None:
    """Recomputation saves and restores the state of the device's generator, which here is the CPU's.

    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/tensor_parallel/random.py#L41
    """
    random = sys.modules["megatron.core.tensor_parallel.random"]
    vars(random)["_get_cuda_rng_state"] = lambda *_, **__: torch.get_rng_state()
    vars(random)["_set_cuda_rng_state"] = lambda state, *_, **__: torch.set_rng_state(state)
    # The two being one here, megatron would note at every draw that the other one moved as well.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def _answer_tensor_methods() -> None:
    """Calls of `Tensor.cuda()` and comparisons of `Tensor.type()` sit in three functions; they run under answers.

    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/models/common/language_module/language_module.py#L244
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/distrib_optimizer.py#L361
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/clip_grads.py#L167
    """
    language = sys.modules["megatron.core.models.common.language_module.language_module"]
    optimizer = sys.modules["megatron.core.optimizer.optimizer"]
    distributed = sys.modules["megatron.core.optimizer.distrib_optimizer"]
    for owner, name in (
        (language.LanguageModule, "setup_embeddings_and_output_layer"),
        (distributed.DistributedOptimizer, "__init__"),
        (optimizer, "clip_grad_by_total_norm_fp32"),
    ):
        function = getattr(owner, name)
        if not hasattr(function, "__wrapped__"):
            setattr(owner, name, _under_answers(function))


def _count_routed_tokens_on_host() -> None:
    """Counts of tokens that go to experts are there already, and become numbers as they do on the way from a device.

    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/moe/moe_utils.py#L1078
    """
    dispatcher = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    vars(dispatcher)["maybe_move_tensor_to_cpu"] = _on_host


def _on_host(counts: Any, as_numpy: bool = False, **_: Any) -> Any:
    return counts.numpy() if as_numpy and torch.is_tensor(counts) else counts


def _under_answers(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def answered(*args: Any, **kwargs: Any) -> Any:
        with _TensorMethodsAnswerCuda():
            return function(*args, **kwargs)

    return answered


class _TensorMethodsAnswerCuda(TorchFunctionMode):
    """Within it a CPU tensor is its own `.cuda()`, and names its type as a CUDA tensor would."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        answer = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer
