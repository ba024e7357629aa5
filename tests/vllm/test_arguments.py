"""Goal: vLLM's flags pass unchanged, and those that the runtime owns are refused with a reason.

Method: the real parser of the installed vLLM, on typical command lines.
"""

from types import SimpleNamespace

import pytest

from engine.backends.vllm.api import arguments
from plumbing.errors import UsageError

MODEL = "/models/some"


OWNED_FLAGS = [
    *(["--host", "0.0.0.0"], ["--port", "9000"], ["--uds", "/tmp/a.sock"], ["--enable-sleep-mode"]),
    *(["--worker-cls", "some.Worker"], ["--distributed-executor-backend", "ray"]),
    *(["--data-parallel-size", "2"], ["--gpu-memory-utilization", "0.5"], ["--disable-log-stats"]),
    ["--kv-transfer-config", '{"kv_connector": "x", "kv_role": "kv_both"}'],
]


@pytest.mark.parametrize("given", OWNED_FLAGS, ids=lambda given: given[0])
def test_an_owned_flag_is_refused_by_name(given):
    """Goal: such a flag is never ignored silently; method: flags of every kind."""
    with pytest.raises(UsageError) as refused:
        arguments.parse([MODEL, *given], {})
    assert refused.value.code == "vllm.owned_flag"
    assert given[0] in refused.value.message


def test_every_owned_flag_is_one_of_vllms():
    """Goal: no name here has been renamed away in vLLM, which would let it pass; method: all of
    them against the parser."""
    known = {action.dest for action in arguments._parser()._actions}
    assert set(arguments.OWNED) <= known


@pytest.mark.parametrize(
    ("variable", "value", "is_refused"),
    [
        ("VLLM_CPU_KVCACHE_SPACE", "4", True),
        ("VLLM_SERVER_DEV_MODE", "1", True),
        ("VLLM_SERVER_DEV_MODE", "0", False),
        ("VLLM_PLUGINS", "lora_filesystem_resolver", True),
        ("VLLM_PLUGINS", "", True),
        ("VLLM_PLUGINS", "their_own,understudy", False),
    ],
)
def test_variables_that_the_runtime_owns(variable, value, is_refused):
    """Goal: one size of the KV cache, said in one place; no endpoints that park an engine; our
    plugin in every process; method: vLLM's variables for these."""
    environ = {variable: value}
    if not is_refused:
        arguments.parse([MODEL], environ)
        return
    with pytest.raises(UsageError, match=variable):
        arguments.parse([MODEL], environ)


@pytest.mark.parametrize(
    "given", [["--no-such-flag"], ["--tensor-parallel-size", "many"], ["--version"]]
)
def test_arguments_that_vllm_rejects_are_a_usage_error(given):
    """Goal: a sentence and exit code 2 instead of a usage text; method: vLLM's own refusals."""
    with pytest.raises(UsageError, match=r"vllm\.arguments"):
        arguments.parse([MODEL, *given], {})


def test_other_flags_pass_and_owned_flags_are_set():
    """Goal: users write what they know; method: the namespace that vLLM gets."""
    given = ["--load-format", "dummy", "--middleware", "their.own", "-tp", "2"]
    given += ["--kv-cache-memory-bytes", "64M", "--max-model-len", "128"]
    args = arguments.parse([MODEL, *given], {}).vllm
    assert (args.model, args.tensor_parallel_size, args.max_model_len) == (MODEL, 2, 128)
    assert args.kv_cache_memory_bytes == 64 << 20
    assert args.load_format == "understudy"
    assert args.model_loader_extra_config == {
        "load_format": "dummy",
        "extra": {},
        "unshareable": "refuse",
    }
    assert args.middleware == ["their.own"]
    assert args.distributed_executor_backend == "mp"


@pytest.mark.parametrize(
    ("given", "on_cpu", "on_cuda"),
    [
        ([], True, False),
        (["--kv-memory", "gms"], True, True),
        (["--kv-memory", "private"], False, False),
    ],
)
def test_kv_memory_is_the_services_by_default_on_host_memory_only(
    monkeypatch, given, on_cpu, on_cuda
):
    """Goal: no GPU's memory outlives its engine before the fence was measured on one; method: the
    choice by the platform."""
    assert arguments.parse([MODEL, *given], {}).kv.is_shared is on_cpu
    from vllm import platforms

    gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    monkeypatch.setattr(platforms, "current_platform", gpu)
    assert arguments.parse([MODEL, *given], {}).kv.is_shared is on_cuda


def test_memory_of_gms_is_refused_on_gpus_that_share_one_context(monkeypatch, tmp_path):
    """Goal: no engine reads memory that a killed one's kernels still write; method: an environment
    with MPS, on a CPU build and then on a GPU."""
    from vllm import platforms

    command, with_mps = [MODEL, "--kv-memory", "gms"], {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert arguments.parse(command, with_mps).kv.is_shared
    gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    monkeypatch.setattr(platforms, "current_platform", gpu)
    with pytest.raises(UsageError) as caught:
        arguments.parse(command, with_mps)
    assert caught.value.code == "vllm.mps"
    assert str(tmp_path) in caught.value.message
    assert not arguments.parse([MODEL], with_mps).kv.is_shared


def test_each_feature_can_be_switched_off_and_the_self_test_asked_for():
    plain = arguments.parse([MODEL], {})
    assert (plain.no_resume, plain.no_sleep, plain.self_test) == ("", "", False)
    asked = arguments.parse([MODEL, "--no-resume", "--no-sleep", "--self-test"], {})
    assert "--no-resume" in asked.no_resume
    assert "--no-sleep" in asked.no_sleep
    assert asked.self_test
    assert not hasattr(asked.vllm, "no_resume")
