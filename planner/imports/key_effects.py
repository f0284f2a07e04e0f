"""What a key of a trainer is to a plan where it is not read: without effect on it, or something to be told.

Without effect on a step's time, memory and losses, as this project plans them, are files, names, logs, checkpoints,
validation, the data's columns, and choices within a kernel or an engine. All other keys that are not read are named.
Read in the files of the trainers that `planner/export/data` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "verl": (
        "*.checkpoint.*", "*.max_model_len", "*.dist_checkpointing_*", "*.use_dist_checkpointing", "*.dist_ckpt_*",
        "*.distrib_optim_*", "*.profiler*", "*.seed", "*.data_loader_seed", "*.shuffle", "*.external_lib",
        "*.trust_remote_code", "*.use_shm", "*.custom_chat_template", "*.hf_config_path", "*.tokenizer_path",
        "*.use_mbridge", "*.vanilla_mbridge", "*.val_kwargs.*", "*.log_stats", "*.disable_log_stats",
        "*.logprobs_mode", "*.skip_tokenizer_init", "*.load_format", "*.layered_summon", "*.full_determinism",
        "*.scheduling_policy", "*.router_config_path", "*.ignore_eos", "*.do_sample", "*.mode",
        "*.custom_async_server.*", "*.agent_loop_config_path", "*.nccl_timeout",
        "*.update_weights_bucket_megabytes", "*.custom_backend_module", "*.bootstrap_port", "*.ib_device",
        "*.moe_load_balance_metrics_interval", "*.image_*", "*.limit_images", "*.calculate_entropy",
        "*.calculate_sum_pi_squared", "*.calculate_log_probs", "*.lr_warmup_init",
        "*.use_checkpoint_opt_param_scheduler", "*.total_training_steps", "*.weight_decay_incr_style", "*.muon*",
        "*.betas", "*.use_remove_padding", "*.apply_rope_fusion", "*.attention_backend",
        "*.gradient_accumulation_fusion", "*.moe_permute_fusion", "*.lora.dropout*", "*.lora.lora_?_init_method",
        "*.lora.adapter_path", "*.lora_adapter_path", "*.lora.a2a_experimental", "*.lora.freeze_*",
        "*.freeze_vision_tower", "*.forward_only", "*.dtype", "*.prompt_length", "*.response_length", "*.rollout_n",
        "*.ppo_kl_coef", "*.recompute_num_layers", "*.recompute_method", "*.multi_turn.format",
        "*.tokenization_sanity_check_mode", "*.use_inference_chat_template", "*.enable_chunked_prefill",
        "*.cudagraph_capture_sizes", "*.use_torch_compile", "*.use_distributed_optimizer", "*.override_config*",
        "*.entropy_checkpointing", "*.pad_to_length*", "*.pad_bshd_to_minibatch_max", "*.record_file",
        "*.replay_file", "*.max_seqlen_per_dp_cp_rank", "*.clip_cov_*", "*.kl_cov_ratio", "*.dro_beta", "*.tau_neg",
        "*.tau_pos", "*.prompt_key", "*.loss_scale_factor", "data.*files", "data.*_key", "data.*max_samples",
        "data.truncation", "data.filter_overlong_prompts*", "data.return_*", "data.tokenizer", "data.custom_cls.*",
        "data.dataloader_num_workers", "data.*_path", "data.apply_chat_template_kwargs*",
        "data.mm_processor_kwargs*", "data.val_batch_size", "data.*shuffle", "data.seed", "data.trust_remote_code",
        "ray_kwargs.*", "trainer.logger", "trainer.*_name", "trainer.*_freq", "trainer.*dir", "trainer.resume_*",
        "trainer.total_*", "trainer.val_*", "trainer.max_*_ckpt_to_keep", "trainer.log_val_generations",
        "trainer.del_local_ckpt_after_load", "trainer.esi_redundant_time", "trainer.ray_wait_*",
        "trainer.checkpoint_callback_class", "trainer.device", "trainer.use_v1", "trainer.balance_batch",
        "trainer.v1.sync", "trainer.v1.*.num_warmup_batches", "algorithm.kl_ctrl.horizon",
        "algorithm.kl_ctrl.target_kl", "algorithm.pf_ppo.*", "algorithm.kl_penalty", "*.kl_loss_type",
        "reward*.rollout.temperature", "reward*.rollout.top_*", "reward*.rollout.n", "*sandbox_fusion.*",
        "reward_model.model.external_lib", "*.reward_loop_*", "*.reward_manager*", "*.overlong_buffer_cfg.log",
        "*.max_resp_len", "*.cliprange_value_low", "*.engine_kwargs*", "*.mbridge_config*", "*.exclude_modules",
        "*.fused_kernel_options.*",
    ),
    "openrlhf": (
        "ckpt.*", "logger.*", "eval.*", "local_rank", "use_ms", "data.*", "train.seed", "train.num_episodes",
        "train.full_determinism_enable", "ds.attn_implementation", "ds.value_head_prefix", "ds.use_universal_ckpt",
        "ds.ring_attn_head_stride", "ds.packing_samples", "ds.param_dtype", "ds.lora.dropout", "*.adam.betas",
        "*.adam.eps", "*.muon.*", "critic.save_value_network", "actor.freeze_visual_encoder",
        "*.gradient_checkpointing_reentrant",
        "vllm.enable_sleep", "vllm.sync_backend", "vllm.sync_with_ray", "algo.kl.estimator",
        "algo.kl.horizon", "algo.kl.target", "algo.kl.unbiased_gradient", "save_path", "max_samples", "param_dtype",
        "input_key", "label_key", "input_template", "apply_chat_template", "use_wandb", "wandb_*", "ckpt_*",
        "save_*", "load_checkpoint", "max_ckpt_*", "logging_steps", "eval_*", "flash_attn", "attn_implementation",
        "use_tensorboard", "bf16", "seed", "num_episodes", "prompt_split", "prompt_data_probs", "max_len",
        "lr_warmup_*", "train.ema_beta",
    ),
    "nemo-rl": (
        "checkpointing.*", "logger.*", "data.*", "*.tokenizer.*", "*.generation_batch_size", "*.seed",
        "*.max_num_*", "*.val_*", "*.max_val_samples", "*.converter_type", "*.pipeline_dtype", "*.moe_router_*",
        "*.freeze_moe_router", "*.moe_permute_fusion", "*.apply_rope_fusion", "*.bias_activation_fusion",
        "*.moe_per_layer_logging", "*.empty_unused_memory_level", "*.env_vars*", "*.sequence_length_round",
        "*.algorithm", "*.microbatch_order", "*.make_sequence_length_divisible_by", "*.stop_*",
        "*.use_gloo_process_groups", "*.adam_beta*", "*.adam_eps", "*.sgd_momentum", "*.optimizer.optimizer",
        "*.bf16", "*.fp16", "*.weight_decay_incr_style", "*.start_weight_decay", "*.end_weight_decay",
        "*.lr_decay_iters", "*.lr_warmup_init", "*.average_in_collective", "*.overlap_param_gather",
        "*.overlap_grad_reduce", "*.use_custom_fsdp", "*.data_parallel_sharding_strategy", "*.optimizer.name",
        "*.kwargs.betas", "*.kwargs.eps", "*.kwargs.foreach", "*.kwargs.fused", "policy.scheduler*",
        "value.scheduler*", "*.dtensor_cfg._v2", "*.custom_parallel_plan", "*.num_*_layers_in_bf16",
        "*.use_deep_gemm", "*.distributed_executor_backend", "cluster.segment_size", "*.reference_policy_kl_type",
        "*.use_on_policy_kl_approximation", "env.*.num_workers", "env.*.math_verify_impl", "env.*.checkpoint_path",
        "*.cuda_graph_*", "*.lora_A_init_method", "*.lora_B_init_method", "*.peft.dropout*", "*.peft.restore_from",
        "*.peft.a2a_experimental", "*.lora_cfg.dropout*", "*.use_distributed_optimizer", "env.reward_model.enabled",
        "env.reward_model.max_model_len", "env.reward_model.batch_size", "*.min_lr", "*.policy_training_start_step",
        "*.warmup_generation_lead_steps",
    ),
    "slime": (
        "*save*", "load", "ref-load", "prompt-data", "*-key", "apply-chat-template*", "rollout-shuffle",
        "num-rollout", "num-epoch", "eval-*", "n-samples-per-eval-prompt", "use-wandb", "wandb-*",
        "use-tensorboard", "seed", "rollout-seed", "balance-data", "optimizer", "adam-*", "kl-loss-type",
        "recompute-method", "lr-decay-style", "recompute-num-layers", "attention-*", "hidden-dropout",
        "num-gpus-per-node", "flush-cache-interval", "update-weight-buffer-size", "use-distributed-optimizer",
        "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups",
        "group-query-attention", "kv-channels", "vocab-size", "rotary-*", "use-rotary-position-embeddings",
        "disable-bias-linear", "add-qkv-bias", "normalization", "norm-epsilon", "swiglu", "qk-layernorm",
        "untie-embeddings-and-output-weights", "position-embedding-type", "moe-router-*", "moe-layer-freq",
        "num-experts", "moe-ffn-hidden-size", "moe-permute-fusion", "moe-grouped-gemm", "moe-aux-loss-coeff",
        "sglang-attention-backend", "sglang-log-*", "sglang-enable-deterministic-inference", "rollout-stop*",
        "debug-*", "tokenizer-*", "megatron-to-hf-mode", "post-layernorm", "post-self-attn-layernorm",
        "post-mlp-layernorm", "make-vocab-size-divisible-by", "norm-*", "rm-type", "multi-latent-attention",
        "q-lora-rank", "kv-lora-rank", "qk-*", "v-head-dim", "moe-shared-expert-*",
        "no-check-for-nan-in-loss-and-grad",
    ),
}  # fmt: skip
"""Patterns of keys, by the trainer."""

NAMED: Mapping[str, str] = {
    "*multi_turn.*": "turns with a tool need their numbers and lengths: give workload.turns in the job",
    "*max_rollout_turns": "turns with a tool need their numbers and lengths: give workload.turns in the job",
    "*agent*": "rollouts by an agent of one's own have turns and latencies that no key says; one turn is planned",
    "*filter_groups*": "how many groups have a signal is said by no key: give workload.dynamic_sampling in the job",
    "*dynamic_filtering*": "how many groups have a signal is said by no key: give workload.dynamic_sampling in the job",
    "*dynamic_sampling*": "how many groups have a signal is said by no key: give workload.dynamic_sampling in the job",
    "*dynamic-sampling*": "how many groups have a signal is said by no key: give workload.dynamic_sampling in the job",
    "*over-sampling*": "how many groups have a signal is said by no key: give workload.dynamic_sampling in the job",
    "*lora*": "what of an adapter is beyond its rank and its alpha is not read",
    "*peft*": "what of an adapter is beyond its rank and its alpha is not read",
    "*distillation*": "teachers beside a reward are no stage here",
    "*opd*": "teachers beside a reward are no stage here",
    "*teacher*": "teachers beside a reward are no stage here",
    "*grad_reduce_in_fp32*": "gradients are costed in fp32",
    "*accumulate-allreduce-grads-in-fp32*": "gradients are costed in fp32",
    "*offload*": "what of this is kept in host memory has no choice of a plan",
    "*fp8*": "training in 8 bits is not planned",
    "*mtp*": "further heads that predict tokens are not costed",
    "*specul*": "speculative decoding is not costed",
    "*overlong*": "it is not read here",
    "*partial*": "responses that go on in the next step are no choice of an imported plan",
    "*gradient_checkpointing*": "recomputation is read from its own keys",
}
"""Patterns of keys that may change a step, with what is to be known of them, the first that matches."""

_OTHERWISE = "it may change a step, and has no word in a job or a plan"


def has_no_effect(trainer: str, key: str) -> bool:
    """Whether a plan does not depend on a key of a trainer."""
    return any(fnmatchcase(key, pattern) for pattern in WITHOUT_EFFECT[trainer])


def named(trainer: str, keys: Iterable[str]) -> dict[str, str]:
    """The keys that are not without effect, each with what is to be known of it."""
    return {key: _reason(key) for key in keys if not has_no_effect(trainer, key)}


def _reason(key: str) -> str:
    return next((reason for pattern, reason in NAMED.items() if fnmatchcase(key, pattern)), _OTHERWISE)
