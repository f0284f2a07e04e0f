"""Do it, or rehearse it, with real processes.

Importing any part of the runtime hides what megatron-core and torch say about themselves, which a user can do nothing
about; it happens here because some of it is said while they are imported.
"""

import warnings

_REMARKS: tuple[tuple[str, type[Warning]], ...] = (
    # Optional extras of megatron-core that are not needed, and the names of other parts that it still calls.
    (r"(Transformer Engine and Apex are|Apex is) not installed", UserWarning),
    (r"[\s\S]*(will be removed|is deprecated)[\s\S]*megatron", DeprecationWarning),
    (r"`torch.jit.script_method` is deprecated", DeprecationWarning),
    # Said by every configuration, which does not use CUDA graphs.
    (r"full scope is deprecated", UserWarning),
    # Said of every configuration that divides experts both ways, also where nothing is trained.
    (r"When using expert parallelism and tensor parallelism for training", UserWarning),
    # Said of experts that are whole beside layers that tensor parallelism cuts: their own products have no part in it.
    (r"`sequence_parallel` is set to `True`, but tensor model parallel size is 1", UserWarning),
    # Said whenever the core attention is recomputed; it is not Transformer Engine's.
    (r"If you are using transformer_engine as the transformer implementation", UserWarning),
    # Megatron's optimizer looks for gradients on views of its fp32 weights, finds none, and goes on.
    # https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/optimizer.py#L66
    (r"The .grad attribute of a Tensor that is not a leaf Tensor is being accessed", UserWarning),
    # Names that torch has renamed and megatron has not.
    (r"`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated", FutureWarning),
    (r"`load_state_dict` is deprecated", FutureWarning),
    (r"Please use DTensor instead", FutureWarning),
)

for _message, _category in _REMARKS:
    warnings.filterwarnings("ignore", message=_message, category=_category)
