"""Let every process of this Python's environment find the package."""

from __future__ import annotations

from hack.v2_on_cpu import FOUND_BY_ALL, PATHS

# Python executes a line that begins with `import`. Not PYTHONPATH, which others set.
LINE = f"import os, sys; os.environ.get('TRITON_INTERPRET') == '1' and sys.path.extend({[*PATHS]})"

if __name__ == "__main__":
    FOUND_BY_ALL.write_text(f"{LINE}\n", encoding="utf-8")
