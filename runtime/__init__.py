"""The runtime executes a plan, or rehearses it, with real processes.

Importing any part of it silences warnings of megatron-core and torch that a user can do nothing about. The filters are
set here because some of the warnings are raised while those libraries are imported.
"""

import warnings

_IGNORED_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # Optional extras of megatron-core that are not needed, and deprecated names that it still calls.
    (r"(Transformer Engine and Apex are|Apex is) not installed", UserWarning),
    (r"[\s\S]*(will be removed|is deprecated)[\s\S]*megatron", DeprecationWarning),
    (r"`torch.jit.script_method` is deprecated", DeprecationWarning),
    # Raised by every configuration; CUDA graphs are not used.
    (r"full scope is deprecated", UserWarning),
    # Raised by every configuration with expert and tensor parallelism, even where nothing is trained.
    (r"When using expert parallelism and tensor parallelism for training", UserWarning),
    # Raised where experts are whole (etp 1) beside tensor-parallel layers: the expert GEMMs are not sharded.
    (r"`sequence_parallel` is set to `True`, but tensor model parallel size is 1", UserWarning),
    # Raised whenever the core attention is recomputed; it is not Transformer Engine's.
    (r"If you are using transformer_engine as the transformer implementation", UserWarning),
    # Megatron's optimizer reads .grad of views of its fp32 weights, which have none, and continues.
    # https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/optimizer.py#L66
    (r"The .grad attribute of a Tensor that is not a leaf Tensor is being accessed", UserWarning),
    # Names that torch has changed and megatron still uses.
    (r"`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated", FutureWarning),
    (r"`load_state_dict` is deprecated", FutureWarning),
    (r"Please use DTensor instead", FutureWarning),
)

for _message, _category in _IGNORED_WARNINGS:
    warnings.filterwarnings("ignore", message=_message, category=_category)
