"""The contracts with vLLM by which an engine rests in place, and rests without its weights; data
only, a part of `contract_list.py`. If one of the first is broken, the engine hands over by a
relaunch and never sleeps; if one of `worker/offloading.py` is, its weights stay where they are."""

from __future__ import annotations

from engine.backends.vllm.contract_forms import Contract, contains, every, takes, within

async_llm = within("v1/engine/async_llm.py")
block_pool = within("v1/core/block_pool.py")
core_client = within("v1/engine/core_client.py")
engine_core = within("v1/engine/core.py")
executor = within("v1/executor/abstract.py")
gpu_worker = within("v1/worker/gpu_worker.py")
multiproc = within("v1/executor/multiproc_executor.py")
scheduler = within("v1/core/sched/scheduler.py")
worker_base = within("v1/worker/worker_base.py")

REST: dict[str, tuple[Contract, ...]] = {
    "core_serving.py": (
        engine_core(
            "methods that are added to the core are called by name",
            "EngineCoreProc._handle_client_request",
            contains("getattr(self, method_name)"),
        ),
        engine_core(
            "the core says whether its scheduler is paused",
            "EngineCore.is_scheduler_paused",
            contains("self.scheduler.pause_state != PauseState.UNPAUSED"),
        ),
        core_client(
            "methods that are added to the core are called from another process",
            "AsyncMPClient.call_utility_async",
            takes("method"),
        ),
    ),
    "api/resting.py": (
        async_llm(
            "an engine sleeps once its requests are done, or aborts them",
            "AsyncLLM.sleep",
            every(takes("level", "mode"), contains("self.engine_core.sleep_async(level, mode)")),
        ),
        engine_core(
            "the core pauses, resets its caches at level 1, and only then parks its workers",
            "EngineCore.sleep",
            contains(
                "clear_prefix_cache = level >= 1",
                "self.pause_scheduler(mode=mode, clear_cache=clear_prefix_cache)",
                "pause_future.add_done_callback(pause_complete)",
            ),
        ),
        engine_core(
            "a sleep that waits can be overtaken by one that aborts",
            "EngineCoreProc.pause_scheduler",
            contains(
                "self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)",
                "PauseState.PAUSED_NEW",
                "self._idle_state_callbacks.append(",
            ),
        ),
        engine_core(
            "a pause ends with an idle device and with caches that are reset",
            "EngineCore._finish_pause",
            contains("collective_rpc('synchronize_device')", "self._reset_caches()"),
        ),
        engine_core(
            "the caches that are reset include that of prefixes",
            "EngineCore._reset_caches",
            contains("if not self.reset_prefix_cache("),
        ),
        scheduler(
            "a scheduler resets the cache of prefixes, or says that it has not",
            "Scheduler.reset_prefix_cache",
            every(
                takes("reset_running_requests"),
                contains("reset_successful = self.kv_cache_manager.reset_prefix_cache()"),
            ),
        ),
        block_pool(
            "the cache of prefixes is not reset while a block is in use",
            "BlockPool.reset_prefix_cache",
            contains("if num_used_blocks != 1:", "return False"),
        ),
        executor(
            "workers that sleep are not parked again",
            "Executor.sleep",
            contains("if 'weights' in self.sleeping_tags", "self.sleeping_tags |= SLEEP_TAGS"),
        ),
        engine_core(
            "the core says whether it is awake, and schedules only then",
            "EngineCore.wake_up",
            contains(
                "fully_awake = not self.model_executor.is_sleeping",
                "if fully_awake:",
                "return fully_awake",
            ),
        ),
    ),
    "worker/offloading.py": (
        gpu_worker(
            "a worker runs a step in one method",
            "Worker.execute_model",
            every(takes("scheduler_output"), contains("self.model_runner.execute_model(")),
        ),
        gpu_worker(
            "a worker runs an empty step in one method",
            "Worker.execute_dummy_batch",
            contains("self.model_runner._dummy_run("),
        ),
        worker_base(
            "steps go through the worker, not past it to its model",
            "WorkerWrapperBase.execute_model",
            contains("self.worker.execute_model(scheduler_output)"),
        ),
        multiproc(
            "a step of the core is a call of the workers' method for steps",
            "MultiprocExecutor.execute_model",
            contains("'execute_model'"),
        ),
        scheduler(
            "a scheduler that is paused begins no request",
            "Scheduler.schedule",
            contains("self._pause_state == PauseState.UNPAUSED"),
        ),
    ),
}
