"""The contracts with vLLM that no import shows: what we call, override and rely on.

Data only; `contracts.py` checks it. Code that relies on something new in vLLM adds a line here:
what must hold, our file that needs it, and where it is.
"""

from __future__ import annotations

from engine.backends.vllm import contract_forms as form
from engine.backends.vllm.contract_forms import contains, every, exists, takes, takes_only, within
from engine.backends.vllm.contract_list_kv import KV
from engine.backends.vllm.contract_list_rest import REST
from engine.backends.vllm.contract_list_resume import RESUME

# vLLM's files that are looked into.
compilation = within("config/compilation.py")
app_state = within("entrypoints/launchers/api_server/app_state.py")
application = within("entrypoints/launchers/app.py")
launcher = within("entrypoints/launchers/launcher.py")
linear = within("model_executor/layers/linear.py")
quantisation = within("model_executor/layers/quantization/base_config.py")
layer_utils = within("model_executor/layers/utils.py")
embedding = within("model_executor/layers/vocab_parallel_embedding.py")
loaders = within("model_executor/model_loader/__init__.py")
loader = within("model_executor/model_loader/base_loader.py")
loader_utils = within("model_executor/model_loader/utils.py")
async_llm = within("v1/engine/async_llm.py")
engine_core = within("v1/engine/core.py")
output_processor = within("v1/engine/output_processor.py")
shm_broadcast = within("distributed/device_communicators/shm_broadcast.py")
executor = within("v1/executor/abstract.py")
multiproc = within("v1/executor/multiproc_executor.py")
stat_loggers = within("v1/metrics/loggers.py")
cpu_runner = within("v1/worker/cpu_model_runner.py")
cpu_runner_v2 = within("v1/worker/cpu/model_runner.py")
cpu_worker = within("v1/worker/cpu_worker.py")
attention_utils = within("v1/worker/gpu/attn_utils.py")
gpu_runner = within("v1/worker/gpu_model_runner.py")
gpu_worker = within("v1/worker/gpu_worker.py")
worker_utils = within("v1/worker/utils.py")
worker_base = within("v1/worker/worker_base.py")

# How the engine core plans a KV cache before 0.33, and since: versions.py does the same.
KV_PLAN = "get_kv_cache_configs(vllm_config, kv_cache_specs, available_gpu_memory)"
KV_PLAN_OF_GROUPS = (
    "global_kv_cache_groups = get_global_kv_cache_groups(vllm_config, kv_cache_specs)",
    KV_PLAN.replace(")", ", global_kv_cache_groups)"),
)

ALLOCATES = contains("with allocation_context", "allocate_kv_cache(")
PACKS = contains("dispatch_cpu_unquantized_gemm(")
PLUGINS = "load_general_plugins()"

# A name whose place depends on the version: what must hold, our file that needs it, the places.
PLACES = (
    *(
        (
            f"the parser of vLLM's flags has {name}",
            "versions.py",
            tuple((f"vllm.entrypoints.{at}.cli_args", name) for at in ("common", "launchers")),
        )
        for name in ("make_arg_parser", "validate_parsed_serve_args")
    ),
    (
        "the engine core's plan of a KV cache can be computed",
        "versions.py",
        tuple(
            (f"vllm.v1.core.{at}", "get_kv_cache_configs")
            for at in ("kv_cache_planning", "kv_cache_utils")
        ),
    ),
    (
        "rotary embeddings are registered per process",
        "worker/model_load.py",
        (("vllm.model_executor.layers.rotary_embedding", "_ROPE_DICT"),),
    ),
)

# By our file that relies on them.
CONTRACTS: dict[str, tuple[form.Contract, ...]] = {
    "worker/plugin.py": (
        engine_core(
            "plugins are loaded in the engine core before it has workers",
            "EngineCore.__init__",
            contains(PLUGINS),
        ),
        worker_base(
            "plugins are loaded in a worker, which resolves its class by name",
            "WorkerWrapperBase.init_worker",
            contains(PLUGINS, "resolve_obj_by_qualname"),
        ),
        loaders(
            "a loader is registered by its load format",
            "register_model_loader",
            takes("load_format"),
        ),
    ),
    "membership.py": (
        multiproc(
            "workers are processes named VllmWorker-<rank>",
            "WorkerProc.make_worker_process",
            contains("VllmWorker-{rank}"),
        ),
    ),
    "worker/weights.py": (
        loader(
            "a model loader must have download_model and load_weights, no more",
            "BaseModelLoader",
            form.abstract_only("download_model", "load_weights"),
        ),
        loader(
            "a model loader is asked for a whole model",
            "BaseModelLoader.load_model",
            takes("vllm_config", "model_config", "prefix"),
        ),
        loader_utils(
            "a model is created without its weights",
            "initialize_model",
            takes("vllm_config", "prefix", "model_config"),
        ),
        loader_utils(
            "weights are processed after they are loaded, by one function",
            "process_weights_after_loading",
            takes("model", "model_config", "target_device"),
        ),
        loader(
            "a loader creates its model in a method of its own",
            "BaseModelLoader.load_model",
            contains("self.create_model("),
        ),
    ),
    "worker/model_load.py": (
        compilation(
            "a model's layers are registered in its compilation configuration",
            "CompilationConfig",
            contains("static_forward_context:", "static_all_moe_layers:"),
        ),
        quantisation(
            "a quantisation method declares whether processed weights can be shared",
            "QuantizeMethodBase",
            contains("supports_pre_processed_weights"),
        ),
        layer_utils(
            "the CPU build computes an unquantised layer with its cpu_linear",
            "cpu_unquantized_gemm",
            contains("layer.cpu_linear(x, weight, bias)"),
        ),
        linear(
            "the CPU build packs an unquantised layer where its method processes weights",
            "UnquantizedLinearMethod.process_weights_after_loading",
            PACKS,
        ),
        embedding(
            "the CPU build packs an embedding where its method processes weights",
            "UnquantizedEmbeddingMethod.process_weights_after_loading",
            PACKS,
        ),
    ),
    "worker/worker.py": (
        shm_broadcast(
            "a worker that waits for a call spins for a while after the last one, and no longer",
            "SpinCondition.wait",
            every(
                takes_only("timeout_ms"),
                contains("self.last_read + self.busy_loop_s", "self.poller.poll("),
            ),
        ),
        worker_base(
            "a worker knows the address at which its ranks meet",
            "WorkerBase.__init__",
            contains("self.distributed_init_method = distributed_init_method"),
        ),
        gpu_worker(
            "a worker supplies the context in which its KV cache is allocated",
            "Worker._maybe_get_memory_pool_context",
            takes_only("tag"),
        ),
        gpu_worker(
            "a worker passes that context to its model runner",
            "Worker.initialize_from_config",
            contains(
                "_maybe_get_memory_pool_context", "'kv_cache'", "kv_cache_allocation_context="
            ),
        ),
        gpu_worker(
            "a worker's memory is not measured when its KV cache has a given size",
            "Worker.determine_available_memory",
            contains("kv_cache_memory_bytes"),
        ),
        gpu_worker("a worker knows its layers' KV cache", "Worker.get_kv_cache_spec", takes_only()),
        gpu_worker("a worker sleeps at a level", "Worker.sleep", takes_only("level")),
        gpu_worker("a worker wakes by tags", "Worker.wake_up", takes_only("tags")),
        gpu_worker("a worker discards by tags", "Worker.discard", takes_only("tags")),
        gpu_worker(
            "a worker's KV cache is set up from one configuration",
            "Worker.initialize_from_config",
            takes("kv_cache_config"),
        ),
        *(
            gpu_worker(
                f"a worker has Worker.{name}, which ours refuses", f"Worker.{name}", form.exists
            )
            for name in (
                "reload_weights",
                "update_weights",
                "init_weight_transfer_engine",
                "start_weight_update",
                "finish_weight_update",
            )
        ),
        *(
            executor(
                f"{call} reaches every worker",
                f"Executor.{call}",
                contains(f"collective_rpc('{call}'", argument),
            )
            for call, argument in (("sleep", "level"), ("wake_up", "tags"))
        ),
    ),
    "worker/worker_cpu.py": (
        cpu_worker(
            "a worker of the CPU build is a Worker",
            "CPUWorker",
            contains("class CPUWorker(Worker)"),
        ),
        cpu_worker(
            "a worker of the CPU build decides whether it warms up",
            "CPUWorker._should_warm_up_model",
            takes_only(),
        ),
        *(
            runner(
                f"the runner of version {version} for the CPU warms up",
                "CPUModelRunner.warming_up_model",
                takes_only(),
            )
            for version, runner in ((1, cpu_runner), (2, cpu_runner_v2))
        ),
    ),
    "worker/kv_arena.py": (
        worker_utils("a KV cache is one buffer", "allocate_kv_cache", form.one_zeros_of_int8),
        gpu_runner(
            "the runner of version 1 allocates inside the context",
            "GPUModelRunner.initialize_kv_cache_tensors",
            ALLOCATES,
        ),
        attention_utils(
            "the runner of version 2 allocates inside the context", "init_kv_cache", ALLOCATES
        ),
    ),
    "kv_size.py": (
        engine_core(
            "the engine core registers KV cache kinds, sets the workers' layout, plans the cache",
            "EngineCore._initialize_kv_caches",
            lambda node: (
                contains("register_all_kvcache_specs(vllm_config)", "set_kv_cache_layout(")(node)
                and (contains(KV_PLAN)(node) or contains(*KV_PLAN_OF_GROUPS)(node))
            ),
        ),
    ),
    "api/arguments.py": (
        worker_utils(
            "on a GPU, vLLM requires gpu_memory_utilization of it to be free at start",
            "request_memory",
            contains("gpu_memory_utilization", "free_memory"),
        ),
    ),
    "api/main.py": (
        async_llm(
            "an engine is created from a configuration and stat loggers",
            "AsyncLLM.from_vllm_config",
            takes("vllm_config", "usage_context", "stat_loggers", "enable_log_requests"),
        ),
    ),
    "api/backend.py": (
        async_llm(
            "every worker can be called by method name",
            "AsyncLLM.collective_rpc",
            takes("method", "timeout", "args"),
        ),
        async_llm("an engine sleeps at a level", "AsyncLLM.sleep", takes("level")),
        async_llm("an engine wakes", "AsyncLLM.wake_up", takes("tags")),
        async_llm("an engine reports when it is dead", "AsyncLLM.errored", exists),
        stat_loggers(
            "a stat logger is called for every step", "StatLoggerBase.record", form.exists
        ),
        output_processor(
            "requests in flight can be counted",
            "OutputProcessor.get_num_unfinished_requests",
            takes_only(),
        ),
    ),
    "api/http.py": (
        launcher(
            "the server's socket is created from its arguments",
            "setup_server",
            takes("args", "reuse_port"),
        ),
        launcher(
            "the server runs on a given socket and can be reached through the application",
            "serve_http",
            lambda node: takes("app", "sock")(node) and contains("app.state.server = server")(node),
        ),
        application(
            "the application is built from arguments and tasks",
            "build_app",
            takes("args", "supported_tasks", "model_config"),
        ),
        app_state(
            "the application's state is set up from an engine",
            "init_app_state",
            takes("engine_client", "state", "args", "supported_tasks"),
        ),
    ),
    **KV,
    **REST,
    **RESUME,
}
