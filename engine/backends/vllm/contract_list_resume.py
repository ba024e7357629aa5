"""The contracts with vLLM by which a request is taken up again; data only, a part of
`contract_list.py`. If one is broken, the engine serves and its streams end with it."""

from __future__ import annotations

from engine.backends.vllm.contract_forms import (
    Contract,
    contains,
    every,
    exists,
    takes,
    takes_only,
    within,
)

scheduler_config = within("config/scheduler.py")
model_config = within("config/model.py")
vllm_config = within("config/vllm.py")
sampling_params = within("sampling_params.py")
async_scheduler = within("v1/core/sched/async_scheduler.py")
scheduler = within("v1/core/sched/scheduler.py")
scheduler_utils = within("v1/core/sched/utils.py")
engine_types = within("v1/engine/__init__.py")
async_llm = within("v1/engine/async_llm.py")
output_processor = within("v1/engine/output_processor.py")
stats = within("v1/metrics/stats.py")
outputs = within("v1/outputs.py")
request = within("v1/request.py")
top_k_top_p = within("v1/sample/ops/topk_topp_sampler.py")
sampler = within("v1/sample/sampler.py")
structured_output = within("v1/structured_output/__init__.py")
cpu_runner = within("v1/worker/cpu_model_runner.py")
input_batch = within("v1/worker/gpu_input_batch.py")
gpu_runner = within("v1/worker/gpu_model_runner.py")
runner_v2 = within("v1/worker/gpu/model_runner.py")
states_v2 = within("v1/worker/gpu/states.py")
bad_words_v2 = within("v1/worker/gpu/sample/bad_words.py")
gumbel_v2 = within("v1/worker/gpu/sample/gumbel.py")
logit_bias_v2 = within("v1/worker/gpu/sample/logit_bias.py")
penalties_v2 = within("v1/worker/gpu/sample/penalties.py")
sampler_v2 = within("v1/worker/gpu/sample/sampler.py")

RESUME: dict[str, tuple[Contract, ...]] = {
    "resume/scheduler.py": (
        scheduler_config(
            "a scheduler's class is found by its name",
            "SchedulerConfig.get_scheduler_cls",
            contains("resolve_obj_by_qualname(self.scheduler_cls)"),
        ),
        async_scheduler(
            "the overlapping scheduler is a Scheduler",
            "AsyncScheduler",
            contains("class AsyncScheduler(Scheduler)"),
        ),
        scheduler(
            "a request enters the scheduler whole, by its id",
            "Scheduler.add_request",
            every(takes_only("request"), contains("self.requests[request.request_id] = request")),
        ),
        scheduler(
            "a request that runs for the first time is among the new ones of its step",
            "Scheduler.schedule",
            contains(
                "if request.status == RequestStatus.WAITING:\n",
                "scheduled_new_reqs.append(request)",
                "scheduled_new_reqs=new_reqs_data",
            ),
        ),
        scheduler(
            "cached tokens are counted only for a request that was never preempted",
            "Scheduler.schedule",
            contains("request.num_preemptions <= 0"),
        ),
        scheduler(
            "a request waits for its grammar in one place, which takes an exception for one",
            "Scheduler._handle_blocked_waiting_request",
            every(
                takes_only("request"),
                contains(
                    "RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
                    "isinstance(struct_output_req.grammar, Exception)",
                ),
            ),
        ),
        structured_output(
            "a request's grammar hears of tokens through its manager",
            "StructuredOutputManager.accept_tokens",
            takes("request", "new_token_ids"),
        ),
        request(
            "output tokens can be appended to a request",
            "Request.append_output_token_ids",
            takes("token_ids"),
        ),
    ),
    "resume/batch.py": (
        input_batch(
            "the batch lays a request out with the output that it has",
            "InputBatch.add_request",
            every(takes_only("request"), contains("= request.output_token_ids")),
        ),
        input_batch(
            "the batch's requests hold their output and generator",
            "CachedRequestState",
            contains("output_token_ids:", "generator:", "sampling_params:"),
        ),
        gpu_runner(
            "the runner adds requests, which have no output at first, to its batch in one place",
            "GPUModelRunner._update_states",
            contains("self.input_batch.add_request(", "output_token_ids=[]"),
        ),
        sampler(
            "a sampler has a part that draws",
            "Sampler.__init__",
            contains("self.topk_topp_sampler"),
        ),
        top_k_top_p(
            "what draws takes logits, and generators by row",
            "TopKTopPSampler.forward_native",
            takes("logits", "generators", "k", "p"),
        ),
    ),
    "resume/batch_cpu.py": (
        cpu_runner(
            "the CPU build's runner is the GPU's",
            "CPUModelRunner",
            contains("class CPUModelRunner(GPUModelRunner)"),
        ),
        gpu_runner(
            "the runner samples in a method of its own",
            "GPUModelRunner._sample",
            contains("self.sampler("),
        ),
        gpu_runner(
            "behind it the draws of incomplete prefills are taken back",
            "GPUModelRunner._bookkeeping_sync",
            contains("self.discard_request_mask.np[:num_reqs]", "input_batch.generators.get("),
        ),
    ),
    "resume/runner_v2.py": (
        scheduler(
            "a request that was preempted is sent as a new one, with all of its tokens",
            "Scheduler.schedule",
            contains(
                "if self.use_v2_model_runner:",
                "scheduled_new_reqs.extend(scheduled_resumed_reqs)",
                "req._all_token_ids, uses_mrope=",
            ),
        ),
        runner_v2(
            "the runner lays a request out with all tokens, and knows where its prompt ends",
            "GPUModelRunner.add_requests",
            contains(
                "prompt_len = new_req_data.prompt_len",
                "all_token_ids=new_req_data.prefill_token_ids",
                "num_computed_tokens=new_req_data.num_computed_tokens",
            ),
        ),
        states_v2(
            "a request's state keeps prompt and prefill apart",
            "RequestState.add_request",
            contains(
                "self.prompt_len.np[req_idx] = prompt_len",
                "self.prefill_len.np[req_idx] = prefill_len",
                "self.total_len.stage_write_elem(req_idx, prefill_len)",
            ),
        ),
        penalties_v2(
            "penalties count the output that a request comes with",
            "_bincount_kernel",
            contains("mask = block < prefill_len", "mask &= block >= prompt_len"),
        ),
        bad_words_v2(
            "bad words are looked for in all of the output",
            "_bad_words_kernel",
            contains("output_len = total_len - prompt_len"),
        ),
        logit_bias_v2(
            "minimum lengths count from the end of the prompt",
            "LogitBiasState.add_request",
            contains("prompt_len + min_tokens"),
        ),
        gumbel_v2(
            "noise is a function of seed, position and token",
            "gumbel_noised_argmax",
            takes("keys", "seed", "pos"),
        ),
        sampler_v2(
            "no sampler that ignores seeds runs for a batch with one",
            "Sampler.sample",
            contains("self.sampling_states.any_explicit_seed(idx_mapping_np)"),
        ),
    ),
    "resume/llm.py": (
        scheduler_utils(
            "whether a request has ended can be asked",
            "check_stop",
            takes("request", "max_model_len"),
        ),
        request(
            "a scheduler's request is made of the one that the core is sent",
            "Request.from_engine_core_request",
            takes("request", "block_hasher"),
        ),
        request("a request tells how it ended", "Request.get_finished_reason", exists),
        engine_types(
            "an output of the core has tokens, logprobs and an end",
            "EngineCoreOutput",
            contains("new_token_ids:", "new_logprobs:", "finish_reason:", "stop_reason:"),
        ),
        outputs(
            "logprobs have three arrays, and how many each request has",
            "LogprobsLists",
            contains(
                "logprob_token_ids:",
                "logprobs:",
                "sampled_token_ranks:",
                "cu_num_generated_tokens:",
            ),
        ),
        output_processor(
            "outputs of the core are processed wherever they come from",
            "OutputProcessor.process_outputs",
            takes("engine_core_outputs"),
        ),
        output_processor(
            "a collector is asked without waiting",
            "RequestOutputCollector.get_nowait",
            every(takes_only(), contains("self.output")),
        ),
        output_processor(
            "a collector is asked and waits",
            "RequestOutputCollector.get",
            every(takes_only(), contains("self.output")),
        ),
        stats(
            "a request's times are kept for its latencies",
            "RequestStateStats",
            contains("first_token_ts:", "last_token_ts:", "num_generation_tokens:"),
        ),
        sampling_params(
            "parameters of a request can be copied, and carry what is not vLLM's",
            "SamplingParams",
            contains("extra_args:", "def clone(self)"),
        ),
        async_llm(
            "the engine asks the collector before it waits",
            "AsyncLLM.generate",
            every(
                takes("prompt", "sampling_params", "request_id", "lora_request"),
                contains("q.get_nowait() or await q.get()"),
            ),
        ),
        async_llm(
            "a request is admitted, and then made known to the output processor and the core",
            "AsyncLLM._add_request",
            every(
                takes_only("request", "prompt", "parent_req", "index", "queue"),
                contains(
                    "self.check_admission(request_id=request.request_id)",
                    "self.output_processor.add_request(request, prompt, parent_req, index, queue)",
                    "await self.engine_core.add_request_async(request)",
                ),
            ),
        ),
    ),
    "api/continuation.py": (
        vllm_config(
            "which model runner is in use is known",
            "VllmConfig.use_v2_model_runner",
            exists,
        ),
        async_llm("an engine has a tokenizer", "AsyncLLM.get_tokenizer", takes_only()),
        model_config(
            "a model's sampling defaults are known",
            "ModelConfig.get_diff_sampling_param",
            takes_only(),
        ),
    ),
}
