"""How long a pod that is told to end may take, and how much of that time its streams get.

Kubernetes, systemd and `understudy up` are told the same number: whoever changes one, changes all.
"""

from __future__ import annotations

GRACE_MS = 45_000
ENDING_MS = 2_000  # of it: for the errors of streams that are left, for dying trees, for exits
DRAIN_MS = GRACE_MS - ENDING_MS
