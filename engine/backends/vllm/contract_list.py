"""The contracts with vLLM that an import does not show: what we call, override and count on.

Data only; `contracts.py` reads it. Whoever uses something new of vLLM adds a line here: what breaks
in words, the file that needs it, and where it is.
"""

from __future__ import annotations

from engine.backends.vllm.contracts import (
    Contract,
    abstract_only,
    exists,
    one_zeros_of_int8,
    says,
    takes,
    takes_only,
)

GPU_WORKER = "v1/worker/gpu_worker.py"
CPU_WORKER = "v1/worker/cpu_worker.py"
WORKER_BASE = "v1/worker/worker_base.py"
WORKER_UTILS = "v1/worker/utils.py"
MULTIPROC = "v1/executor/multiproc_executor.py"
ENGINE_CORE = "v1/engine/core.py"
ASYNC_LLM = "v1/engine/async_llm.py"
LAUNCHER = "entrypoints/launchers/launcher.py"
LOADER = "model_executor/model_loader/base_loader.py"
LOADER_UTILS = "model_executor/model_loader/utils.py"
LINEAR = "model_executor/layers/linear.py"

# How the engine core plans a KV cache before 0.33, and since: shim.py does the same.
KV_PLAN = "get_kv_cache_configs(vllm_config, kv_cache_specs, available_gpu_memory)"
KV_PLAN_OF_GROUPS = (
    "global_kv_cache_groups = get_global_kv_cache_groups(vllm_config, kv_cache_specs)",
    KV_PLAN.replace(")", ", global_kv_cache_groups)"),
)

# A name in one of several places, by version: what the contract is, who uses it, where it may be.
PLACES = (
    *(
        (
            f"the parser of vLLM's flags has {name}",
            "shim.py",
            tuple((f"vllm.entrypoints.{at}.cli_args", name) for at in ("common", "launchers")),
        )
        for name in ("make_arg_parser", "validate_parsed_serve_args")
    ),
    (
        "the engine core's plan of a KV cache can be asked for",
        "shim.py",
        tuple(
            (f"vllm.v1.core.{at}", "get_kv_cache_configs")
            for at in ("kv_cache_planning", "kv_cache_utils")
        ),
    ),
    (
        "rotary embeddings are registered for a whole process",
        "registries.py",
        (("vllm.model_executor.layers.rotary_embedding", "_ROPE_DICT"),),
    ),
)

CONTRACTS = (
    # ---------------------------------------------------------------- the plugin
    Contract(
        "plugins are loaded in the engine core before it has workers",
        "plugin.py",
        ENGINE_CORE,
        "EngineCore.__init__",
        says("load_general_plugins()"),
    ),
    Contract(
        "plugins are loaded in a worker, which resolves its class by name",
        "plugin.py",
        WORKER_BASE,
        "WorkerWrapperBase.init_worker",
        says("load_general_plugins()", "resolve_obj_by_qualname"),
    ),
    Contract(
        "a loader is registered by its load format",
        "plugin.py",
        "model_executor/model_loader/__init__.py",
        "register_model_loader",
        takes("load_format"),
    ),
    Contract(
        "workers are processes named VllmWorker-<rank>",
        "membership.py",
        MULTIPROC,
        "WorkerProc.make_worker_process",
        says("VllmWorker-{rank}"),
    ),
    # ---------------------------------------------------------------- weights
    Contract(
        "a model loader has to have download_model and load_weights, no more",
        "loader.py",
        LOADER,
        "BaseModelLoader",
        abstract_only("download_model", "load_weights"),
    ),
    Contract(
        "a model loader is asked for a whole model",
        "loader.py",
        LOADER,
        "BaseModelLoader.load_model",
        takes("vllm_config", "model_config", "prefix"),
    ),
    Contract(
        "a model is made without its weights",
        "weights.py",
        LOADER_UTILS,
        "initialize_model",
        takes("vllm_config", "prefix", "model_config"),
    ),
    Contract(
        "weights are processed after they are loaded, by one function",
        "weights.py",
        LOADER_UTILS,
        "process_weights_after_loading",
        takes("model", "model_config", "target_device"),
    ),
    Contract(
        "a quantisation says whether processed weights can be shared",
        "sharing.py",
        "model_executor/layers/quantization/base_config.py",
        "QuantizeMethodBase",
        says("supports_pre_processed_weights"),
    ),
    Contract(
        "the CPU build computes an unquantised layer by its cpu_linear",
        "sharing.py",
        "model_executor/layers/utils.py",
        "cpu_unquantized_gemm",
        says("layer.cpu_linear(x, weight, bias)"),
    ),
    Contract(
        "the CPU build packs an unquantised layer where its method processes weights",
        "sharing.py",
        LINEAR,
        "UnquantizedLinearMethod.process_weights_after_loading",
        says("dispatch_cpu_unquantized_gemm("),
    ),
    Contract(
        "the CPU build packs an embedding where its method processes weights",
        "sharing.py",
        "model_executor/layers/vocab_parallel_embedding.py",
        "UnquantizedEmbeddingMethod.process_weights_after_loading",
        says("dispatch_cpu_unquantized_gemm("),
    ),
    Contract(
        "a loader creates its model by a method of its own",
        "weights.py",
        LOADER,
        "BaseModelLoader.load_model",
        says("self.create_model("),
    ),
    Contract(
        "a model's layers are registered in its compilation's configuration",
        "registries.py",
        "config/compilation.py",
        "CompilationConfig",
        says("static_forward_context:", "static_all_moe_layers:"),
    ),
    Contract(
        "a worker knows where its ranks meet",
        "worker.py",
        WORKER_BASE,
        "WorkerBase.__init__",
        says("self.distributed_init_method = distributed_init_method"),
    ),
    # ---------------------------------------------------------------- the worker
    Contract(
        "a worker supplies the context in which its KV cache is allocated",
        "worker.py",
        GPU_WORKER,
        "Worker._maybe_get_memory_pool_context",
        takes_only("tag"),
    ),
    Contract(
        "a worker hands that context to its model runner",
        "worker.py",
        GPU_WORKER,
        "Worker.initialize_from_config",
        says("_maybe_get_memory_pool_context", "'kv_cache'", "kv_cache_allocation_context="),
    ),
    Contract(
        "a KV cache is one buffer",
        "kv_arena.py",
        WORKER_UTILS,
        "allocate_kv_cache",
        one_zeros_of_int8,
    ),
    Contract(
        "the runner of version 1 allocates inside the context",
        "kv_arena.py",
        "v1/worker/gpu_model_runner.py",
        "GPUModelRunner.initialize_kv_cache_tensors",
        says("with allocation_context", "allocate_kv_cache("),
    ),
    Contract(
        "the runner of version 2 allocates inside the context",
        "kv_arena.py",
        "v1/worker/gpu/attn_utils.py",
        "init_kv_cache",
        says("with allocation_context", "allocate_kv_cache("),
    ),
    Contract(
        "a worker's memory is not measured where its KV cache has a size",
        "worker.py",
        GPU_WORKER,
        "Worker.determine_available_memory",
        says("kv_cache_memory_bytes"),
    ),
    Contract(
        "the engine core registers the kinds of KV cache, tells its workers the layout, plans one",
        "kv_check.py",
        ENGINE_CORE,
        "EngineCore._initialize_kv_caches",
        lambda node: (
            says("register_all_kvcache_specs(vllm_config)", "set_kv_cache_layout(")(node)
            and (says(KV_PLAN)(node) or says(*KV_PLAN_OF_GROUPS)(node))
        ),
    ),
    Contract(
        "a worker knows its layers' KV cache",
        "worker.py",
        GPU_WORKER,
        "Worker.get_kv_cache_spec",
        takes_only(),
    ),
    Contract(
        "a worker sleeps at a level", "worker.py", GPU_WORKER, "Worker.sleep", takes_only("level")
    ),
    Contract(
        "a worker wakes by tags", "worker.py", GPU_WORKER, "Worker.wake_up", takes_only("tags")
    ),
    Contract(
        "a worker discards by tags", "worker.py", GPU_WORKER, "Worker.discard", takes_only("tags")
    ),
    Contract(
        "a worker's KV cache is set up from one configuration",
        "worker.py",
        GPU_WORKER,
        "Worker.initialize_from_config",
        takes("kv_cache_config"),
    ),
    Contract(
        "a worker of the CPU build is a Worker",
        "worker_cpu.py",
        CPU_WORKER,
        "CPUWorker",
        says("class CPUWorker(Worker)"),
    ),
    Contract(
        "a worker of the CPU build says whether it warms up",
        "worker_cpu.py",
        CPU_WORKER,
        "CPUWorker._should_warm_up_model",
        takes_only(),
    ),
    Contract(
        "a model runner of the CPU build warms up",
        "worker_cpu.py",
        "v1/worker/cpu_model_runner.py",
        "CPUModelRunner.warming_up_model",
        takes_only(),
    ),
    *(
        Contract(f"a worker has {name}, to be refused", "worker.py", GPU_WORKER, name, exists)
        for name in (
            "Worker.reload_weights",
            "Worker.update_weights",
            "Worker.init_weight_transfer_engine",
            "Worker.start_weight_update",
            "Worker.finish_weight_update",
        )
    ),
    Contract(
        "on a GPU a start asks for gpu_memory_utilization of it to be free",
        "arguments.py",
        WORKER_UTILS,
        "request_memory",
        says("gpu_memory_utilization", "free_memory"),
    ),
    # ---------------------------------------------------------------- the engine
    Contract(
        "an engine is made of a configuration and stat loggers",
        "api.py",
        ASYNC_LLM,
        "AsyncLLM.from_vllm_config",
        takes("vllm_config", "usage_context", "stat_loggers", "enable_log_requests"),
    ),
    Contract(
        "every worker can be called by a method's name",
        "backend.py",
        ASYNC_LLM,
        "AsyncLLM.collective_rpc",
        takes("method", "timeout", "args"),
    ),
    Contract(
        "an engine sleeps at a level", "backend.py", ASYNC_LLM, "AsyncLLM.sleep", takes("level")
    ),
    Contract("an engine wakes", "backend.py", ASYNC_LLM, "AsyncLLM.wake_up", takes("tags")),
    Contract("an engine says when it is dead", "backend.py", ASYNC_LLM, "AsyncLLM.errored", exists),
    Contract(
        "sleep reaches every worker",
        "worker.py",
        "v1/executor/abstract.py",
        "Executor.sleep",
        says("collective_rpc('sleep'", "level"),
    ),
    Contract(
        "waking reaches every worker",
        "worker.py",
        "v1/executor/abstract.py",
        "Executor.wake_up",
        says("collective_rpc('wake_up'", "tags"),
    ),
    Contract(
        "a stat logger is told of every step",
        "progress.py",
        "v1/metrics/loggers.py",
        "StatLoggerBase.record",
        exists,
    ),
    Contract(
        "requests in flight can be counted",
        "backend.py",
        "v1/engine/output_processor.py",
        "OutputProcessor.get_num_unfinished_requests",
        takes_only(),
    ),
    # ---------------------------------------------------------------- the HTTP server
    Contract(
        "the server's socket is made from its arguments",
        "http.py",
        LAUNCHER,
        "setup_server",
        takes("args", "reuse_port"),
    ),
    Contract(
        "the server runs on a socket that it is given and can be reached through the application",
        "http.py",
        LAUNCHER,
        "serve_http",
        lambda node: takes("app", "sock")(node) and says("app.state.server = server")(node),
    ),
    Contract(
        "the application is built of arguments and tasks",
        "http.py",
        "entrypoints/launchers/app.py",
        "build_app",
        takes("args", "supported_tasks", "model_config"),
    ),
    Contract(
        "the application's state is set up of an engine",
        "http.py",
        "entrypoints/launchers/api_server/app_state.py",
        "init_app_state",
        takes("engine_client", "state", "args", "supported_tasks"),
    ),
)
