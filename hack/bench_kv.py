"""`python hack/bench_kv.py` is `python -m hack.bench_kv`.

To `import`, the package of the same name comes first, so nothing ever imports this file.
"""

import runpy
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
runpy.run_module("hack.bench_kv", run_name="__main__", alter_sys=True)
