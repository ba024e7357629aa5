"""Which locks there are: those of the pod, or of each of its models.

`active` says which engine stands for a model, `loader` which one may write its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockserver.core.events import LockRecord
from plumbing.pod.models import ACTIVE, LOADER, kind_of, lock_of

KINDS: Mapping[str, bool] = {ACTIVE: True, LOADER: False}  # name → is it fenced


def kinds_of(models: Sequence[str]) -> dict[str, bool]:
    """The locks of these models; of a pod without models, if there are none."""
    return {
        lock_of(kind, model): is_fenced
        for model in models or ("",)
        for kind, is_fenced in KINDS.items()
    }


def with_filed(kinds: Mapping[str, bool], record: LockRecord) -> dict[str, bool]:
    """`kinds`, and the locks that somebody holds on file although the settings no longer have them:
    while it lives, its lock is not forgotten."""
    filed = {name: KINDS.get(kind_of(name), True) for name in record.holders}
    return filed | dict(kinds)
