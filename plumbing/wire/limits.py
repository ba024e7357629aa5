"""Every limit of the wire, each with its reason. Reaching a limit is an error with a code."""

from __future__ import annotations

# Control messages are small; the status of a pod with dozens of waiting engines is about 30 KiB.
FRAME_BYTES_MAX = 256 * 1024

# A manifest of 12,000 tensors is about 2 MiB of MessagePack; the largest checkpoints have ~60,000.
MANIFEST_FRAME_BYTES_MAX = 16 * 1024 * 1024

# The kernel's SCM_MAX_FD is 253 (net/scm.h); larger sets are sent in several frames.
FDS_PER_FRAME_MAX = 250

# A pod has a handful of engines with up to 8 ranks each, and a few observers.
CONNECTIONS_MAX = 128

# Three quarters of them: one process that opens connections in a loop must not lock the others
# out. Where PID namespaces hide the process, only the total is limited. Over TCP it is unknown, so
# this counts by address; behind address translation, one may stand for all engines of a node.
CONNECTIONS_PER_PEER_MAX = 96

# An error is one sentence and a few facts. Both are cut to these sizes because they may quote what
# a peer sent, and an error frame that is too large to send would be an error in sending an error.
FAULT_MESSAGE_CHARS_MAX = 4096
FAULT_DETAILS_BYTES_MAX = 64 * 1024

# What one slow reader may hold in our memory: two of the largest frames, or 64 small ones.
QUEUED_BYTES_FRAMES = 64

# Frames of one peer that are handled before the loop turns to the others. One recvmsg may bring
# two thousand requests, and answering each may take a tenth of a millisecond.
FRAMES_PER_TURN = 8

# One recvmsg. Larger than almost every frame, so that a frame costs one system call.
RECEIVE_BYTES = 64 * 1024

# A peer sends its first frame right after connecting, and each frame in one go: five seconds is
# thousands of times the usual, and short enough that a silent peer costs little.
CONNECT_DEADLINE_S = 5.0
FIRST_FRAME_DEADLINE_S = 5.0
FRAME_DEADLINE_S = 5.0

# How long a closing connection may take to deliver its last frame (an error) to the peer.
FLUSH_DEADLINE_S = 1.0

# ETOOMANYREFS and EMFILE end when some process closes descriptors; this is how often we retry.
RETRY_S = 0.05

# struct sockaddr_un: sun_path is 108 bytes with its terminator (man 7 unix).
SOCKET_PATH_BYTES_MAX = 107

# A handshake is two round trips and a millisecond of arithmetic. Until it is done the peer is
# unauthenticated; above these numbers, in all or per address, further ones are dropped at once.
HANDSHAKE_DEADLINE_S = 5.0
HANDSHAKES_MAX = 128
HANDSHAKES_PER_ADDRESS_MAX = 32

# A peer whose host is gone acknowledges nothing, and by default the kernel retries for a quarter
# of an hour. Twice the usual lease: a peer that is silent for longer holds nothing any more.
UNACKNOWLEDGED_MS_MAX = 10_000
KEEPALIVE_IDLE_S = 5
