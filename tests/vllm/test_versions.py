"""Which versions of vLLM are accepted, and that what differs between them is found in this one."""

from __future__ import annotations

import pytest
from vllm.config import VllmConfig
from vllm.triton_utils import HAS_TRITON
from vllm.utils.argparse_utils import FlexibleArgumentParser

from engine.backends.vllm import versions
from plumbing.errors import UsageError
from tests.vllm.conftest import RUNNER

# torch and vLLM say of themselves that they use what torch is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning:vllm")


@pytest.mark.parametrize("version", ["0.30.9", "0.34.0", "1.31.0", "dev", ""])
def test_an_untested_version_is_refused_with_both_versions_and_the_fix(version: str):
    """A minor version outside the range, and a build without a version: refused, with the range and
    the flag; accepted with the flag. Patches and builds of the range's ends need none."""
    with pytest.raises(UsageError) as refused:
        versions.check_version(allow_any=False, version=version)
    assert refused.value.code == "vllm.unsupported_version"
    for part in (version, versions.supported_range(), versions.OVERRIDE_FLAG):
        assert part in refused.value.message
    versions.check_version(allow_any=True, version=version)
    for supported in ("0.31.0", "0.33.1.dev7+cpu", "0.33.9"):
        versions.check_version(allow_any=False, version=supported)


def test_the_installed_version_is_accepted_and_its_parser_found():
    """No override: the version that these tests run with, its flags, and vLLM's own checks."""
    versions.check_version(allow_any=False)
    args = versions.cli_args().make_arg_parser(FlexibleArgumentParser()).parse_args(["some-model"])
    versions.cli_args().validate_parsed_serve_args(args)
    assert args.model_tag == "some-model"


def test_the_tests_run_on_the_runner_that_they_are_for():
    """What vLLM chooses on a GPU, unless the environment names the other one."""
    assert versions.in_use(VllmConfig()) == RUNNER
    assert (RUNNER == versions.V2) == HAS_TRITON
