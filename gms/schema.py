"""The `--json` documents of gms, from which docs/cli_json.md is generated."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, UnsetType

from plumbing.service.schema import ErrorBody, EventRecord, Pid, Schema, Time


class SilentDevice(Schema, kw_only=True):
    """In place of a device, or of its KV memory, whose server does not answer.

    `epoch` and `committed_bytes` are those of its journal.
    """

    device_uuid: Annotated[str, "the device"]
    tag: Annotated[str, "`weights` or `kv`"]
    state: Annotated[str, "`offline`, or `down` on the service's port"]
    online: Annotated[bool, "false"]
    reason: Annotated[str | UnsetType, "only when `offline`: why"] = UNSET
    epoch: Annotated[str | UnsetType | None, "only when `offline`: the committed epoch"] = UNSET
    committed_bytes: Annotated[int | UnsetType, "only when `offline`: its size"] = UNSET
    restarts_total: Annotated[int | UnsetType, "only when `down`: restarts of its server"] = UNSET
    problem: Annotated[str | UnsetType | None, "only when `down`: why"] = UNSET


class DeviceDriver(Schema, kw_only=True):
    cuda_version: Annotated[str | UnsetType, "the version that the driver supports"] = UNSET
    granularity_bytes: Annotated[int | UnsetType, "sizes are rounded up to a multiple of this"] = (
        UNSET
    )
    has_context: Annotated[
        bool | UnsetType, "whether this server has a CUDA context, which takes memory"
    ] = UNSET


class DeviceOffloaded(Schema):
    copy: Annotated[str, "its epoch, on the device of host memory"]
    size_bytes: Annotated[int, "its size"]
    digest: Annotated[str, "digest of its bytes"]


class Client(Schema, kw_only=True):
    engine: Annotated[str, "the engine"]
    incarnation: Annotated[str, "the engine's launch"]
    pid: Annotated[int, "its process"]
    since: Annotated[Time, "when it entered this state, or began to wait"]


class Waiting(Client, kw_only=True):
    reason: Annotated[str, "`writer`, `gms.kv_busy`, …: [states.md](states.md)"]
    message: Annotated[str, "for operators"]
    deadline: Annotated[Time | None, "when its request times out; null: never"]


class DeviceSession(Client, kw_only=True):
    rank: Annotated[int, "its tensor-parallel rank"]
    mode: Annotated[str, "`ro` or `rw`"]
    state: Annotated[str, "`reading`, `writing` …: [states.md](states.md)"]
    epoch: Annotated[str | None, "the epoch that it maps or writes; null until it has one"]
    done_bytes: Annotated[int | UnsetType, "only when it loads and reports progress"] = UNSET
    total_bytes: Annotated[int | UnsetType, "only when it loads and reports progress"] = UNSET


class DeviceWaiting(Waiting, kw_only=True):
    rank: Annotated[int, "its tensor-parallel rank"]
    mode: Annotated[str, "`ro`, `rw`, `rw_or_ro`"]


class DeviceUnowned(Schema, kw_only=True):
    epoch: Annotated[str, "id of the epoch"]
    phase: Annotated[str, "`releasing` or `orphaned`"]
    size_bytes: Annotated[int, "0 while unknown"]
    holders: Annotated[list[Pid], "processes that map it"]


class KvHolder(Schema):
    engine: Annotated[str, "the engine"]
    incarnation: Annotated[str, "the engine's launch"]
    token: Annotated[int, "the token of its grant of `active`"]
    era: Annotated[str, "the era of that token"]


class KvSession(Client, kw_only=True):
    token: Annotated[int, "the token of its grant"]
    state: Annotated[str, "`granted`, `holding`, `leaving`, `returning`: [states.md](states.md)"]


class KvWaiting(Waiting, kw_only=True):
    token: Annotated[int, "the token of its grant"]
    state: Annotated[str, "`waiting`"]


class ServedMemory(Schema, kw_only=True):
    online: Annotated[bool, "it answers"]
    device_uuid: Annotated[str, "UUID of the GPU, or `HOST-0`; in a pool `HOST-0.MODEL`"]
    device: Annotated[str, "without the model"]
    model: Annotated[str | None, "the model whose memory this is"]
    tag: Annotated[str, "what the memory is used for: `weights` or `kv`"]
    memory: Annotated[str, "`host` or `cuda`"]
    driver: Annotated[DeviceDriver, "empty for host memory"]
    pid: Annotated[int, "its server"]
    since: Annotated[Time, "when that server started"]
    restarts_total: Annotated[int, "how often the server of this device has been restarted"]
    as_of_event_id: Annotated[int, "the server's newest event"]
    last_event: Annotated[EventRecord | None, "the newest event"]
    problem: Annotated[str | None, "what is wrong, for operators"]
    recoveries_total: Annotated[int, "regions that engines handed back to a restarted server"]
    protocol_errors_total: Annotated[int, "number of requests refused as the client's fault"]
    open_fds: Annotated[int, "number of descriptors that the server has open"]


class KvStatus(ServedMemory, kw_only=True):
    """The KV cache's memory, as included under a device."""

    state: Annotated[
        str, "`empty`, `making`, `lent`, `idle`, `discarded`, `releasing`, `recovering`, …"
    ]
    pool: Annotated[str | None, "id of the memory; null if there is none"]
    pool_bytes: Annotated[int, "size of the memory; 0 while unknown"]
    index_bytes: Annotated[int, "size of the index beside it"]
    slabs: Annotated[int, "number of its allocations"]
    is_written: Annotated[bool, "an engine has written to it"]
    discarded: Annotated[str | None, "why its content is not lent again; null if it may be"]
    failed_adoptions: Annotated[int, "engines that ended while they adopted it; two discard it"]
    holder: Annotated[
        KvHolder | None, "the incarnation that it was last lent to; null if there is none"
    ]
    mapped_by: Annotated[list[Pid], "processes that map it"]
    sessions: list[KvSession]
    waiting: list[KvWaiting]
    capacity_bytes: Annotated[
        int | None, "limit of weights and KV memory together; null: free memory"
    ]
    pools_made_total: Annotated[int, "pools made; all totals count from the server's start"]
    pools_lent_total: Annotated[int, "incarnations that a pool was lent to"]
    pools_discarded_total: Annotated[int, "pools whose content was never lent again"]
    pools_given_up_total: Annotated[int, "pools that engines freed to sleep"]
    stale_refusals_total: Annotated[int, "claims refused because a newer grant is known"]
    full_waits_total: Annotated[int, "pools that waited for memory to become free"]


class DeviceStatus(ServedMemory, kw_only=True):
    """One device of the memory service, as included in the documents above."""

    state: Annotated[
        str,
        "`empty`, `staging`, `committed`, `recovering`, `offloaded`; no answer: `offline`, `down`",
    ]
    epoch: Annotated[str | None, "the committed epoch, or the one being loaded"]
    offloaded: Annotated[
        DeviceOffloaded | None, "the host copy that replaces the weights; null unless offloaded"
    ]
    identity: Annotated[dict[str, Any] | None, "which weights the epoch contains; null: unknown"]
    layout_hash: Annotated[str | None, "hash of the committed manifest; null: none"]
    digest: Annotated[str | None, "digest of the committed bytes, or `pending`; null: none"]
    committed_bytes: Annotated[int, "in service"]
    staging_bytes: Annotated[int, "being loaded"]
    superseded_bytes: Annotated[int, "out of service and still mapped"]
    releasing_bytes: Annotated[int, "given up and not freed yet"]
    capacity_bytes: Annotated[int, "limit of the device"]
    device_used_bytes: Annotated[
        int | None, "used memory of the GPU, by any process; null: unknown"
    ]
    tensors: Annotated[int, "number of committed tensors"]
    slabs: Annotated[int, "number of committed slabs"]
    sessions: list[DeviceSession]
    waiting: list[DeviceWaiting]
    unowned: Annotated[list[DeviceUnowned], "`releasing` or `orphaned` epochs"]
    kv: Annotated[KvStatus | SilentDevice | None, "null for a host copy"]
    commits_total: Annotated[int, "commits; all totals count from the server's start"]
    offloads_total: Annotated[int, "epochs freed because host memory has a copy"]
    restages_total: Annotated[int, "number of epochs restored from host memory"]
    condemnations_total: Annotated[int, "epochs taken out of service because of bad bytes"]
    exports_total: Annotated[int, "number of epochs exported to readers"]
    reclaims_total: Annotated[int, "number of epochs whose memory was freed"]
    oom_waits_total: Annotated[int, "number of allocations that waited for memory"]


class GmsStatus(Schema):
    """What does each device hold, who maps it, and who is waiting?

    Exit code 3 when a device is offline.
    """

    schema: Annotated[int, "1"]
    online: Annotated[bool, "every device's server answered"]
    devices: Annotated[list[DeviceStatus | SilentDevice], "sorted by name"]


class VerifiedDevice(Schema):
    device_uuid: Annotated[str, "the device"]
    result: Annotated[
        str, "`empty`, `intact`, `pending`, `recovering`, `unreachable`, `failed`, `altered`"
    ]
    epoch: Annotated[str | None, "the epoch that was verified; null if none was"]
    expected: Annotated[str | None, "the writer's digest; null if there is none"]
    found: Annotated[str | None, "the digest computed now; null if none was"]
    reader: Annotated[str | None, "the command that computed it; null if none did"]
    error: Annotated[ErrorBody | None, "null unless the result is `unreachable` or `failed`"]


class VerifyDocument(Schema):
    """Are the committed bytes still what was written?

    For results and exit codes see [reference.md](reference.md#gms-verify).
    """

    schema: Annotated[int, "1"]
    result: Annotated[str, "the most serious result of all devices"]
    devices: list[VerifiedDevice]


class DroppedDevice(Schema):
    device_uuid: Annotated[str, "the device"]
    epoch: Annotated[str, "the epoch that was taken out of service"]
    readers: Annotated[list[str], "readers that still map it; its memory is freed when they detach"]


class DropDocument(Schema):
    """What was taken out of service?"""

    schema: Annotated[int, "1"]
    devices: list[DroppedDevice]


class DroppedKvDevice(Schema):
    device_uuid: Annotated[str, "the device"]
    result: Annotated[str, "`freed`, `already_empty`"]
    pool: Annotated[str | None, "id of the memory that is free now; null if there was none"]
    pool_bytes: Annotated[int, "its size"]


class DropKvDocument(Schema):
    """What became of the memory that no engine uses?"""

    schema: Annotated[int, "1"]
    devices: list[DroppedKvDevice]


class GmsServiceStatus(Schema):
    """The devices as the service's HTTP port reports them, at most a second old."""

    schema: Annotated[int, "1"]
    as_of_event_id: Annotated[int, "the newest event of `/events` on this port"]
    pid: Annotated[int, "supervisor of the devices' servers"]
    restarts: Annotated[int, "restarts by the container's init"]
    problem: Annotated[str | None, "what is wrong with this port, for operators"]
    devices: Annotated[
        list[DeviceStatus | SilentDevice], "as reported by its server within the last second"
    ]
