"""The limits that several modules of the wire share, each with its reason; those of one module are
at its head. Reaching a limit is an error with a code."""

from __future__ import annotations

# Control messages are small; the status of a pod with dozens of waiting engines is about 30 KiB.
FRAME_BYTES_MAX = 256 * 1024

# The kernel's SCM_MAX_FD is 253 (net/scm.h); larger sets are sent in several frames.
FDS_PER_FRAME_MAX = 250

# A pod has a handful of engines with up to 8 ranks each, and a few observers.
CONNECTIONS_MAX = 128

# Three quarters of them: one process that opens connections in a loop must not lock the others
# out. Where PID namespaces hide the process, only the total is limited. Over TCP it is unknown, so
# this counts by address; behind address translation, one may stand for all engines of a node.
CONNECTIONS_PER_PEER_MAX = 96

# Until a TLS handshake is done the peer is unauthenticated; above this, further ones are dropped.
HANDSHAKES_MAX = 128

# A server on this host accepts at once, unless it hangs.
CONNECT_DEADLINE_S = 5.0

# ETOOMANYREFS and EMFILE end when some process closes descriptors; this is how often we retry.
RETRY_S = 0.05
