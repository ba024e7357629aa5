"""`python -m gms.vmm.cuda_visible`: which devices CUDA shows to a process with this environment.

One JSON document on stdout, `{"devices": [id, …]}` in CUDA's order or `{"error": {…}}`. A process
of its own, because CUDA reads its environment once, and because a driver that hangs or crashes must
not take a supervisor with it.
"""

from __future__ import annotations

import json
import sys

from gms.vmm.cuda_driver import initialised, visible_ids
from plumbing.errors import UnderstudyError


def main() -> int:
    """Print the devices; 0, or 1 with an error."""
    try:
        print(json.dumps({"devices": visible_ids(initialised())}))
    except UnderstudyError as error:
        print(json.dumps({"error": error.to_dict()}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
