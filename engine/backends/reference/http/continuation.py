"""The continuation id: two engines with the same one give the same answer to a request.

Everything that decides the next token, or its text, is in it: weights, arithmetic and release (from
the identity of the weights), tokenizer, chat template and the limit of the context.
"""

from __future__ import annotations

import hashlib
import json
import os
from importlib import metadata

from engine.backends.reference.link import ReadyMsg
from engine.backends.shards import read_file
from plumbing import hop

LIBRARIES = ("tokenizers", "jinja2", "llguidance")  # numpy is in the identity
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def continuation_id(directory: str, model_name: str, ready: ReadyMsg) -> str:
    """Raises as `read_file`."""
    found = hashlib.blake2b(digest_size=16)
    for name in TEXT_FILES:
        path = os.path.join(directory, name)
        content = read_file(path) if os.path.exists(path) else b""
        found.update(b"%d\n" % len(content))
        found.update(content)
    others = {
        "hop": hop.VERSION,
        "identity": ready.identity,
        "model_name": model_name,
        "stop_token_ids": ready.stop_token_ids,
        "max_context": ready.max_context,
        "libraries": [_version(name) for name in LIBRARIES],
    }
    found.update(json.dumps(others, sort_keys=True).encode())
    return f"reference-{found.hexdigest()}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # vendored, or a build without metadata
        return "unknown"
