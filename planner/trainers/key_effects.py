"""Keys of other trainers that the importer does not read: those without effect on a plan, and those that may have one.

Files, names, logs, checkpoints, validation, the data's columns, and choices within a kernel or an engine have no effect
on a step's time, memory and losses as this project plans them. The importer reports every other key that it does not
read, with a reason. Their meaning is taken from the trainers' source files that `planner/trainers/data` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        "*.fused_kernel_options.*", "*.moe_router_*", "*.moe_*_loss_coeff", "*.moe_grouped_gemm", "*.use_flash_attn",
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
        "*.warmup_generation_lead_steps", "*.model_save_format", "*.save_consolidated", "*.single_rank_consolidation",
        "*.consolidation_timeout_minutes", "*.warm_start_value_checkpoint", "*.logprobs_mode",
        "*.vllm_metrics_logger*", "*.enable_vllm_metrics_logger", "*.max_model_len", "*.reward_model_cfg.*",
        "*.use_fused_weighted_squared_relu", "*.skip_tokenizer_init", "*.load_format",
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
        "no-check-for-nan-in-loss-and-grad", "async-strategy", "ckpt-format", "dist-ckpt-strictness", "no-load-*",
        "finetune", "use-pytorch-profiler", "manual-gc", "log-*", "tb-*", "ci-*", "memory-*", "record-memory-history",
        "dump-details", "check-weight-update-equal", "disable-wandb-random-suffix", "distributed-backend",
        "distributed-timeout-minutes", "http-proxy", "use-distributed-post", "use-fault-tolerance",
        "rollout-health-check-*", "rollout-cleanup-timeout", "rollout-session-id", "rollout-data-transport",
        "rollout-data-dir", "rollout-storage-*", "rollout-queue-*", "rollout-io-concurrency",
        "rollout-skip-special-tokens", "skip-eval-before-train", "start-rollout-id", "ref-ckpt-step", "train-backend",
        "train-env-vars", "use-cpu-initialization", "model-name", "seq-length", "max-position-embeddings",
        "padded-vocab-size", "use-rope-scaling", "no-rope-*", "sglang-router-*", "sglang-context-length",
        "sglang-watchdog-timeout", "sglang-enable-metrics", "sglang-*-parser", "custom-rollout-log-function-path",
        "custom-eval-rollout-log-function-path", "sglang-enable-memory-saver", "weight-decay-incr-style",
        "update-weight-disk-*", "update-weight-local-checkpoint-dir", "update-weight-delta-checksum",
    ),
    "skyrl": (
        "data.*", "trainer.eval*", "generator.eval_*", "trainer.epochs", "trainer.max_training_steps", "trainer.ckpt_*",
        "trainer.resume_*", "trainer.*_path", "trainer.logger", "trainer.project_name", "trainer.run_name",
        "trainer.tags", "trainer.hf_save_interval", "trainer.max_ckpts_to_keep", "trainer.dump_*", "trainer.print_*",
        "trainer.log_example_interval", "trainer.num_logger_*", "trainer.seed", "trainer.enable_ray_gpu_monitor",
        "trainer.disable_fast_tokenizer", "*.torch_profiler_config.*", "*.record_memory", "*.hf_export_config.*",
        "*.dist_ckpt_*", "*.adam_betas", "*.served_model_name", "*.enable_ray_prometheus_stats",
        "*.run_engines_locally", "*.distributed_executor_backend", "*.vllm_v1_disable_multiproc", "*.async_engine",
        "generator.batched", "*.chat_template*", "*.use_conversation_multi_turn", "*.append_eos_token*",
        "generator.max_input_length", "*.sampling_params.logprobs", "*.sampling_params.stop", "trainer.flash_attn",
        "trainer.gradient_checkpointing_use_reentrant", "*.moe_router_*", "*.moe_per_layer_logging",
        "*.moe_grouped_gemm", "*.model_dtype", "*.kl_estimator_type", "*.kl_ctrl.horizon", "*.kl_ctrl.kl_target",
        "*.value_head_prefix", "*.lora.dropout", "*.lora_sync_path", "*.lora.init_method", "*.max_loras",
        "*.max_cpu_loras", "*.use_expandable_segments", "trainer.sequence_parallel_backend",
        "trainer.algorithm.temperature", "*.recompute_modules", "*.empty_cuda_cache", "*.average_in_collective",
        "*.language_model_only", "*.enable_chunked_prefill", "*.use_torch_compile", "generator.use_cache_salt",
        "trainer.override_entrypoint", "*.recompute_old_logprobs_per_minibatch",
    ),
    "areal": (
        "*.experiment_name", "*.trial_name", "*.fileroot", "experiment_name", "trial_name", "seed", "total_train_*",
        "cluster.cluster_name", "cluster.name_resolve.*", "scheduler.*", "launcher.*", "saver.*", "recover.*",
        "evaluator.*", "stats_logger.*", "perf_tracer*", "memory_profiler*", "valid_dataset*", "eval_gconfig*",
        "*.scheduling_spec*", "*.scheduling_strategy.fork", "train_dataset.*", "*.attn_impl", "*.use_kernels",
        "*.init_from_scratch", "*.is_critic", "*.disable_dropout", "*.dtype", "*.admin_api_key", "*._version",
        "*.log_level*", "*.request_timeout", "*.request_retries", "*.setup_timeout", "*.log_agent_*",
        "actor.max_new_tokens", "*.mb_spec.granularity", "*.mb_spec.n_mbs*", "*.packing_algorithm", "*.async_save",
        "*.bridge_type", "*.use_bridge_*", "*.use_mbridge_save", "*.use_checkpoint_opt_param_scheduler",
        "*.wrap_with_ddp", "*.ddp.average_in_collective", "*.ddp.bucket_size", "*.ddp.check_for_nan_in_grad",
        "*.ddp.align_param_gather", "*.ddp.use_distributed_optimizer", "*.moe_router_dtype", "*.moe_permute_fusion",
        "*.optimizer.beta*", "*.optimizer.eps", "*.initial_loss_scale", "*.min_loss_scale", "*.loss_scale_window",
        "*.hysteresis", "*.kl_estimator", "*_norm.eps", "*_norm.std_unbiased", "gconfig.skip_special_tokens",
        "gconfig.stop*", "gconfig.lora_name", "rollout.check_trajectory_format", "rollout.dump_to_file",
        "rollout.enable_rollout_tracing", "rollout.model", "rollout.pause_grace_period", "rollout.poll_interval",
        "rollout.queue_size", "rollout.routing_strategy", "rollout.tokenizer_path", "rollout.use_lora",
        "rollout.lora_name", "*.seed", "*.random_seed", "*.skip_tokenizer_init", "*.log_requests*", "*.enable_metrics",
        "*.decode_log_interval", "*.show_time_cost", "*.enable_memory_saver", "*.enable_sleep_mode",
        "*.uvicorn_log_level", "*.worker_extension_cls", "*.distributed_executor_backend", "*.attention_backend",
        "*.recompute_modules", "async_training", "*.max_lora_rank", "*.max_loras", "*.max_loaded_loras",
        "*.lora_modules", "*.lora_paths", "*.enable_lora", "*.lora_backend", "*.enable_multithread_load",
        "gconfig.max_tokens", "*.context_length",
        "*.max_model_len", "rollout.consumer_batch_size", "sglang.model_path", "vllm.model", "tokenizer_path",
        "*.reward_norm.group_size", "*.adv_norm.group_size", "ref.adv_norm.*", "ref.reward_*", "ref.discount",
        "ref.eps_clip*", "ref.use_decoupled_loss", "ref.gae_lambda", "ref.kl_ctl", "ref.max_new_tokens",
        "ref.ppo_n_minibatches",
        "ref.optimizer*", "*.temperature", "ref.weight_update_mode", "critic.weight_update_mode",
        "ref.megatron.virtual_pipeline_parallel_size",
    ),
}  # fmt: skip
"""Patterns (as in `fnmatch`) of keys that a plan does not depend on, by trainer."""

_DYNAMIC_SAMPLING = (
    "no key gives the share of groups with non-zero reward variance: give workload.dynamic_sampling in the job"
)
_AGENT = "no key gives the turns and latencies of a custom rollout or agent loop; single-turn rollouts are planned"
_MULTI_TURN = "multi-turn rollouts need the numbers and lengths of turns: give workload.turns in the job"

_DRAFTS = ("*specul*", "*num-draft-tokens")
"""Patterns of the keys of speculative decoding."""

REASONS: Sequence[tuple[str, Sequence[str]]] = (
    (
        _MULTI_TURN,
        ("*multi_turn.*", "*max_rollout_turns", "*.max_turns", "*step_wise_trajectories", "*merge_stepwise_output"),
    ),
    (
        _AGENT,
        ("*agent*", "custom-generate-function-path", "rollout-function-path", "rollout-buffer-url",
         "rollout-task-type", "fetch-trajectory-retry-times", "min-batch-collection-ratio", "rollout-sample-hook-path"),
    ),
    (
        _DYNAMIC_SAMPLING,
        ("*filter_groups*", "*dynamic_filtering*", "*dynamic_sampling*", "*dynamic-sampling*", "*over-sampling*",
         "*over_sample_rate", "*.batch_multiplier", "data.gen_batch_size", "*vllm_generate_batch_size",
         "algorithm.use_pf_ppo", "*zero_variance_filter*", "*sample_full_batch", "dynamic_bs"),
    ),
    (
        "the teachers of on-policy distillation are not modelled: their forward passes and GPUs are left out",
        ("distillation.*", "*distillation*", "*opd*", "*teacher*"),
    ),
    (
        "FP8 training is not modelled: it is costed in the precision of the job",
        ("*fp8*", "*deepgemm*", "*fp4*", "*load_in_4bit"),
    ),
    ("weights in 4-bit integers are not modelled", ("*int4*",)),
    (
        "how many drafts are accepted is not in the configuration; state it in workload.speculation",
        _DRAFTS,
    ),
    ("MTP heads are not costed", ("*mtp*",)),
    (
        "only the rank and alpha of an adapter are read; it is planned at every linear layer of the actor",
        ("*lora*", "*peft*", "*.target_modules", "target-modules"),
    ),
    (
        "gradients are costed in fp32",
        ("*.grad_reduce_dtype", "*grad_reduce_in_fp32*", "accumulate-allreduce-grads-in-fp32", "*grad_accum*"),
    ),
    (
        "the optimizer is costed as Adam with its state in fp32",
        ("*precision_aware_optimizer", "*precision-aware-optimizer", "*exp_avg*", "*exp-avg*", "*main_grads*",
         "*main-grads*", "*main-params*", "*.params_dtype", "*.optim", "*.optim.optimizer", "*layer_wise*",
         "*override_optimizer_config", "use-stateless-adam", "*reset-optimizer-states",
         "*.optimizer_config_kwargs", "*.optimizer.type", "*.optimizer_dtype", "*.main_params_dtype"),
    ),
    ("training and generation are costed in bf16", ("*.precision", "bf16", "fp16", "trainer.bf16")),
    (
        "a plan offloads only the optimizer state of trained models and the weights of models that only score",
        ("*offload*", "release-train", "*overlap_cpu_optimizer*", "*overlap-cpu-optimizer*"),
    ),
    (
        "a plan recomputes no activations, those of attention (selective) or those of every layer (full)",
        ("*recompute*", "*gradient_checkpointing*", "*.distribute_saved_activations",
         "policy.dtensor_cfg.activation_checkpointing", "value.dtensor_cfg.activation_checkpointing"),
    ),
    (
        "partial rollouts, in-flight weight updates and samples that are several steps old are not modelled: "
        "generation is synchronous or one step ahead",
        ("*partial*", "*in_flight_weight*", "*recompute_kv_cache*", "*max_off_policy*", "*hybrid_rollout.*",
         "*.sampler.*", "*parameter_sync_step", "*async_queue_size", "*drop_incomplete*", "buffer-*",
         "*max_trajectory_age_steps", "max-weight-staleness", "pause-generation-mode", "mask-offpolicy-*",
         "*.max_staleness_steps",
         "*.num_parallel_generation_workers", "*.clear_kv_cache_on_weight_sync"),
    ),
    (
        "it changes the loss or the advantages and not the time of a step; a job has no setting for it",
        ("*clip_ratio", "*clip_ratio_c", "*clip_ratio_high", "*ratio_clip_max", "eps-clip-high",
         "*eps_clip_low_high", "*dual_clip", "eps-clip-c", "*ratio_clip_c", "*rollout_correction.*",
         "*is_correction*", "*importance_sampling*", "*tis-*", "use-tis", "*.aux_loss_coef", "*no_std_norm",
         "*seq_logprob_error*", "*positive_example*", "value_loss_fn.scale", "*disable_ppo_ratio",
         "*kl_*put_clamp_value", "*gae_lambda_*", "*length_adaptive*", "*normalize_advantages", "normalize-advantages",
         "*.adv_estimator.*", "*kl_ctrl.type", "critic.loss_agg_mode", "*opsm*", "use-unbiased-kl", "pg-loss-type",
         "*score-centering*", "loss-mask-type", "loss-type",
         "custom-loss-function-path", "*pg-loss-reducer*", "custom-advantage-function-path",
         "disable-compute-advantages-and-returns", "*calculate_advantages_on_gpu", "get-mismatch-metrics",
         "*off_policy_correction.*", "*.cispo.*", "*.clip_cov.*", "*.kl_cov.*", "*.dppo.*", "*.sapo.*", "*.use_tis",
         "*.tis_imp_ratio_cap", "*.advantage_batch_normalize", "*.moe_aux_loss_coeff",
         "*.algorithm.max_seq_len", "actor.reward_norm.*", "actor.adv_norm.*", "*.c_clip", "*.m2_threshold",
         "*.rejection_sampling*", "*.sapo_tau_*", "*.use_sapo_loss", "*.prox_logp_method",
         "*.importance_sampling_level", "*.mask_no_eos_with_zero", "*.behav*_imp_weight_cap"),
    ),
    (
        "it changes which tokens are sampled and not the time of a step; a job has no setting for it",
        ("*.min_p", "*.repetition_penalty", "*.sampling_params.additional_kwargs", "gconfig.frequency_penalty",
         "gconfig.greedy", "gconfig.ignore_eos", "gconfig.min_new_tokens", "gconfig.use_beam_search"),
    ),
    (
        "it changes the final scalar rewards and not the time of a step; a job has no setting for it",
        ("*reward_scaling*", "*reward_shaping*", "*overlong*", "*stop_properly*", "reward.clip_range",
         "reward.normalize_enable", "disable-rewards-normalization", "custom-reward-post-process-path",
         "*.zero_reward_on_non_stop", "actor.reward_bias", "actor.reward_clip", "actor.reward_scaling"),
    ),
    (
        "how reward calls run is not read: give rewards.workers and rewards.latency_seconds in the job",
        ("reward.num_workers", "reward_model.num_workers", "group-rm", "rm-url", "*custom_reward_function.name",
         "environment.skyrl_gym.*"),
    ),
    (
        "only the warm-up of a learning rate is read, as a number of steps; a decay takes no time in a step and is "
        "given in the job, as actor_schedule or critic_schedule",
        ("*lr_*", "*lr-*", "*min-lr", "*min_lr*", "*.optimizer_config.scheduler", "*.warmup_steps_proportion"),
    ),
    (
        "weight decay and gradient clipping are those of the actor, and constant",
        ("*clip_grad", "*.gradient_clipping", "*max_grad_norm", "*max_norm", "*weight_decay", "*weight-decay*"),
    ),
    (
        "all weights of a model are trained in every step, the critic's in as many minibatches and epochs as the "
        "actor's",
        ("*freez*", "only-train-params-*", "critic.ppo_epochs",
         "critic.ppo_mini_batch_size", "*critic_ppo_epochs", "value.train_global_batch_size", "*.enable_ema",
         "ref-update-interval", "value.*.lr", "value.max_total_sequence_length", "*.update_ref_every_epoch",
         "trainer.critic_mini_batch_size", "critic.ppo_n_minibatches"),
    ),
    (
        "expert parallelism and data-parallel attention within an engine are left free",
        ("*rollout.data_parallel_size", "*rollout.expert_parallel_size", "*.inference_engine.expert_parallel_size",
         "*.vllm_cfg.expert_parallel_size",
         "*enable_expert_parallel", "sglang-dp-size", "sglang-ep-size", "sglang-*dp-attention", "sglang-*dp-lm-head",
         "sglang-*-moe", "sglang-deepep-mode", "sglang-moe-*", "sglang-expert-parallel-size",
         "sglang-data-parallel-size"),
    ),
    (
        "prefill/decode disaggregation is not modelled",
        ("*disaggregation.*", "sglang-disaggregation-*", "*.enable_pd", "*.num_prefill"),
    ),
    (
        "the engine is costed with the defaults of vLLM or SGLang for what it caches, batches and compiles",
        ("*enforce_eager", "*prefix_caching", "*max_num_batched_tokens", "*free_cache_engine", "*multi_stage_wake_up",
         "*mcore_generation_config.*", "*vllm_kwargs*", "*kv_cache_dtype", "sglang-disable-radix-cache",
         "sglang-chunked-prefill-size", "sglang-*cuda-graph*", "sglang-kv-cache-dtype", "sglang-quantization",
         "sglang-*torch-compile", "sglang-server-concurrency", "*quantization*", "*vllm_cfg.async_engine",
         "*generation.backend", "reward*.rollout.*", "*routing_replay*", "*routing-replay*",
         "*.engine_init_kwargs*", "*.router_init_kwargs*", "*.enable_return_routed_experts", "*.return_routed_experts",
         "sglang.*", "vllm.block_size", "vllm.disable_*", "vllm.gdn_*", "vllm.no_enable_*"),
    ),
    (
        "the reward model is costed with the degrees of a plan, and with as many rows as fit into memory",
        ("env.reward_model.*", "reward_model.*"),
    ),
    ("no key gives the turns and latencies of an environment; single-turn rollouts are planned", ("env.*",)),
    (
        "external engines are not planned",
        ("rollout-external-*", "*.external_*_url*", "rollout.api_url", "rollout.provider_api_key"),
    ),
    (
        "new weights are costed over the links between the GPUs that have them and those that take them",
        ("*checkpoint_engine.*", "*refit_*", "*delta_weight_sync.*",
         "update-weight-*", "custom-update-weight-*", "*.weight_sync_backend",
         "*.weight_transfer_*", "*.weight_update_mode"),
    ),
    (
        "expert dispatch is costed as an all-to-all that nothing overlaps",
        ("*token_dispatcher*", "*token-dispatcher*", "*deepep*", "*hybridep*", "*flex_dispatcher*", "*flex-dispatcher*",
         "*shared_expert_overlap", "moe-token-drop-policy"),
    ),
    (
        "layers are split over the stages of a pipeline as evenly as their number allows",
        ("*pipeline_stage", "*.pipeline_model_parallel_layout",
         "decoder-*-pipeline-num-layers", "*virtual-*", "pipeline-model-parallel-layout"),
    ),
    (
        "micro-batches are costed without padding",
        ("*.remove_microbatch_padding", "*.use_sample_packing", "*.pad_to_maximum"),
    ),
    ("context parallelism is balanced over its ranks", ("*dynamic_context_parallel", "allgather-cp")),
    (
        "FSDP, DTensor and ZeRO sharding are not modelled: layouts are Megatron's",
        ("*megatron_fsdp", "*dtensor_cfg.*", "*automodel_cfg.*", "*.strategy", "ds.zpg", "value.optimizer.kwargs.*",
         "value.megatron_cfg.enabled", "*fsdp*", "*ulysses*", "*.sequence_parallel_size",
         "*.archon.*"),
    ),
    (
        "kernels are costed by the profile, or by the analytic model where none is given",
        ("*fused*", "*liger*", "*tiled_mlp*", "*entropy_from_logits*", "*logprob_chunk_size", "log-probs-chunk-size",
         "*defer_fp32_logits", "*gradient_accumulation_fusion", "*prefix_grouper", "*overlap_comm", "*overlap-grad*",
         "*overlap-param*", "*deepcompile", "*experts_implementation", "transformer-impl", "qwen-gdn-backend",
         "data-pad-size-multiplier", "use-rollout-entropy", "*override_ddp_config*", "*override_mcore_model_config*",
         "*override_transformer_config*", "*.ddp_config.overlap_*", "*.transformer_config_kwargs*",
         "*.ddp.overlap_*", "*.overlap_param_gather_with_optimizer_step", "*.use_deterministic_algorithms",
         "*.enable_tree_training",
         "*.logprobs_chunk_size"),
    ),
    (
        "the rows or tokens of a micro-batch are read by one key for each stage, where Megatron trains; elsewhere they "
        "stay free",
        ("*_mb_tokens", "*.mb_spec.*",
         "*sequence_packing*", "*dynamic_batching*", "balance-by-flops", "*micro_batch_size*",
         "*micro-batch-size", "*max_token_len_per_gpu", "*logprob_batch_size"),
    ),
    (
        "the shapes of a model are those of its config.json",
        ("*hf_config_overrides*", "*.megatron_recipe", "spec", "use-gated-attention", "*.model_config_kwargs*"),
    ),
    (
        "images are not read from the configuration, state them in workload.images; audio is not costed",
        ("multimodal-keys", "*vlm*", "*audio*", "*.vision_language_generator"),
    ),
    ("a critic has the actor's layout and pool", ("megatron-config-path",)),
    (
        "a run for debugging leaves stages out, and a plan has them all",
        ("debug-*", "load-debug-*", "load-forge-*", "*.simulate_*", "*.inference_only_init"),
    ),
    (
        "no key gives the time that custom code takes",
        ("custom-*", "rollout-*-path", "data-source-path", "*custom_sampler*"),
    ),
    ("the trainer and its engines take turns on one pool, or have pools of their own", ("*hybrid_engine",)),
)  # fmt: skip
"""Reasons why keys that may change a step are not read, each with patterns of the keys; the first match counts."""

NO_FIELD = "it may change a step, and a job or a plan has no field for it"
"""The reason given for a key that no pattern matches."""


def has_no_effect(trainer: str, key: str) -> bool:
    """True if a plan does not depend on a key of a trainer; it depends on drafts, whatever their engine calls them."""
    return _matches(key, WITHOUT_EFFECT[trainer]) and not _matches(key, _DRAFTS)


def reasons_not_read(trainer: str, keys: Iterable[str]) -> dict[str, str]:
    """Return the keys that may change a step, each with the reason why it is not read."""
    return {key: _reason(key) for key in keys if not has_no_effect(trainer, key)}


def _reason(key: str) -> str:
    return next((reason for reason, patterns in REASONS if _matches(key, patterns)), NO_FIELD)


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
