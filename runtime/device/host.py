"""The device of this process, and the workarounds with which megatron-core runs on the CPU.

The plan decides the device, and `choose` is called once with it; the presence of a GPU decides nothing. A process on
the CPU sees no GPU. megatron-core names CUDA in some two hundred places and needs it in none of those reached here, so
there it gets a copy of the `torch` namespace whose factories and `torch.cuda` use the CPU. `torch` itself is unchanged,
so nothing outside megatron-core sees the stand-in. In a process on CUDA no function is replaced.

Only this file knows of the stand-in, and only here the number of CUDA devices is queried. Each workaround links the
lines of megatron-core that it is for.
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
"""The modules of megatron-core that the runtime uses; they import all others that it reaches."""

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
    """Set the device of this process: the CPU (the default) or the CUDA device `index`.

    Raises BadInput if there is no such device.
    """
    global _chosen  # noqa: PLW0603 - a process has one device
    if kind == "cpu":
        os.environ[_VISIBLE] = ""  # torch itself checks for CUDA in places
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
    """Return the device of this process's tensors."""
    return _chosen


def on_cuda() -> bool:
    """Return True if this process computes on a CUDA device."""
    return _chosen.type == "cuda"


def backend() -> str:
    """Return the torch.distributed backend for tensors on `device()`."""
    return "nccl" if on_cuda() else "gloo"


def num_cuda_devices() -> int:
    """Return the number of CUDA devices that this process can see."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def synchronise() -> None:
    """Wait until all work submitted to the device is done."""
    if on_cuda():
        torch.cuda.synchronize()


def install() -> None:
    """Make megatron-core run on the device of this process; on CUDA this imports it and corrects one fact.

    It may be called repeatedly: a later call covers modules imported since.
    """
    # Megatron overlaps communication by the launch order of kernels, and warns without this setting.
    # https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/tensor_parallel/layers.py
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name in _MODULES:
        importlib.import_module(name)
    _find_transformer_engine()
    if on_cuda():
        return
    _use_cpu_generator_for_cuda()
    _patch_tensor_methods()
    _count_routed_tokens_on_host()
    # The literal device "cuda" and torch.cuda.current_device(), for example
    # https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/pipeline_parallel/schedules.py#L596
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            vars(module)["torch"] = _torch_for_megatron()


def _find_transformer_engine() -> None:
    """Correct what latent attention knows of Transformer Engine: it takes it to be installed if the stand-ins for its
    classes can be imported, which are mocks, and passes them to isinstance.

    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/multi_latent_attention.py#L62
    """
    module: Any = sys.modules["megatron.core.transformer.multi_latent_attention"]
    module.HAVE_TE = isinstance(module.TELinear, type)


@functools.cache
def _torch_for_megatron() -> ModuleType:
    """Return a copy of the `torch` namespace in which "cuda" means the CPU."""
    stand_in = _copy_of(torch)
    for name in _FACTORIES:
        setattr(stand_in, name, _on_cpu(getattr(torch, name)))
    vars(stand_in)["cuda"] = _cuda_for_megatron()
    vars(stand_in)["distributed"] = _copy_of(torch.distributed)
    vars(stand_in.distributed)["all_gather"] = _all_gather
    return stand_in


def _all_gather(outputs: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
    """Gather tensors whose first dimensions may differ, which gloo does not support: they are padded to the longest.

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
    """Return a copy of the `torch.cuda` namespace with functions that work on the CPU."""
    stand_in = _copy_of(torch.cuda)
    replacements: dict[str, Any] = {
        "is_available": lambda: False,
        "is_initialized": lambda: False,
        "device_count": lambda: 0,
        "current_device": device,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        # Device random state, read when weights are initialised and when activations are recomputed:
        # https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/tensor_parallel/random.py#L235
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "manual_seed": torch.manual_seed,
        # https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/distributed/param_and_grad_buffer.py#L417
        "Stream": _NoStream,
        "current_stream": _NoStream,
        "default_stream": _NoStream,
        "stream": lambda _: contextlib.nullcontext(),
    }
    vars(stand_in).update(replacements)
    return stand_in


def _copy_of(module: ModuleType) -> ModuleType:
    copy = ModuleType(module.__name__, module.__doc__)
    vars(copy).update(vars(module))
    return copy


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        requested = kwargs.get("device")
        if requested is not None and torch.device(requested).type == "cuda":
            kwargs["device"] = device()
        return factory(*args, **kwargs)

    return wrapped


class _NoStream:
    """A stream, and an event on it, whose work is always complete."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self) -> _NoStream:
        return self

    def wait_stream(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...


def _use_cpu_generator_for_cuda() -> None:
    """Make recomputation save and restore the CPU's random state in place of the CUDA generator's.

    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/tensor_parallel/random.py#L41
    """
    random = sys.modules["megatron.core.tensor_parallel.random"]
    vars(random)["_get_cuda_rng_state"] = lambda *_, **__: torch.get_rng_state()
    vars(random)["_set_cuda_rng_state"] = lambda state, *_, **__: torch.set_rng_state(state)
    # As the two are the same here, megatron would log at every use that the other one changed as well.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def _patch_tensor_methods() -> None:
    """Wrap the three functions that call `Tensor.cuda()` or compare `Tensor.type()`.

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
            setattr(owner, name, _with_cuda_methods(function))


def _count_routed_tokens_on_host() -> None:
    """Replace the copy of token counts per expert from device to host, which here are on the host already.

    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/transformer/moe/moe_utils.py#L1078
    """
    dispatcher = sys.modules["megatron.core.transformer.moe.token_dispatcher"]
    vars(dispatcher)["maybe_move_tensor_to_cpu"] = _counts_on_host


def _counts_on_host(counts: Any, as_numpy: bool = False, **_: Any) -> Any:
    return counts.numpy() if as_numpy and torch.is_tensor(counts) else counts


def _with_cuda_methods(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _CudaTensorMethods():
            return function(*args, **kwargs)

    return wrapped


class _CudaTensorMethods(TorchFunctionMode):
    """Mode in which `.cuda()` of a CPU tensor returns the tensor, and `.type()` the name of the CUDA type."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result
