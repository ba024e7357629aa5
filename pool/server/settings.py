"""The settings of `pool serve`, and what a model needs before anybody has measured it.

A size is what the pool file says, else what the model's files have. It is never guessed from a
name. Where nothing tells, the size is unknown, and the model is given the whole of its devices
until its engine has measured.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from plumbing.errors import UsageError
from plumbing.pod.paths import DIR, runtime_dir
from plumbing.service.config import Option, Resolved
from plumbing.service.hosts import http_options
from pool.core.facts import ModelSetup, PoolSetup
from pool.core.states import HOST, EngineSizes
from pool.pool_file import ModelSettings, PoolFile, engines_of, read_pool_file, with_served_names

OPTIONS = (
    DIR,
    Option(
        "file",
        str,
        None,
        "The pool file: models, devices and rules, as YAML.",
        env="UNDERSTUDY_POOL",
    ),
    *http_options(9404),
)


@dataclass(frozen=True)
class PoolSettings:
    """One pool. `file` has the names of its devices."""

    directory: str
    file: PoolFile
    path: str = ""  # of the file
    http_host: str = "127.0.0.1"
    http_port: int = 9404
    allowed_hosts: tuple[str, ...] = ()

    def setup_of(self, file: PoolFile) -> PoolSetup:
        """For the core; `file`: this one, with what was set at runtime."""
        models = {
            name: ModelSetup(each, engines_of(name, each), sizes_of(each))
            for name, each in file.models.items()
        }
        devices = (*file.devices, HOST) if file.host_memory else file.devices
        return PoolSetup(models, devices, file)


def settle(config: Resolved) -> PoolSettings:
    """
    Raises:
        UsageError: no pool file, a fault in it, a directory that cannot be used.
    """
    if not config["file"]:
        raise UsageError("pool.no_file", "name the pool file with --file")
    directory, file = runtime_dir(config["dir"]), read_pool_file(config["file"])
    return PoolSettings(
        directory=directory,
        file=with_served_names(file, directory),
        path=os.path.abspath(config["file"]),
        http_host=config["http_host"],
        http_port=config["http_port"],
        allowed_hosts=config["http_allowed_host"],
    )


# Of the files, for all that is not weights: context, graphs, workspaces, KV memory. An engine with
# a large KV cache needs far more, and says so before it takes any.
REST_SHARE = 0.3


def sizes_of(model: ModelSettings) -> EngineSizes | None:
    """By device, for one engine; None: unknown."""
    if model.memory is not None:
        base, weights, kv = model.memory.base, model.memory.weights, model.memory.kv
    else:
        weights = -(-_bytes_of_files(model.model) // len(model.devices))
        base, kv = int(weights * REST_SHARE), 0  # KV memory is in the share of the rest
        if not weights:
            return None
    by_device = [dict.fromkeys(model.devices, each) for each in (base, weights, kv)]
    return EngineSizes(by_device[0], by_device[1], by_device[2], is_estimated=True)


def _bytes_of_files(directory: str) -> int:
    try:
        with os.scandir(directory) as found:
            return sum(each.stat().st_size for each in found if each.name.endswith(".safetensors"))
    except OSError:  # a name that the backend resolves, or nothing: its engine will say
        return 0
