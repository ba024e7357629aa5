"""Write the corpus's seeds: `python -m tests.fuzz.write_corpus`. Found scripts are left alone."""

from __future__ import annotations

from gms.messages import CATALOGUE
from tests.fuzz.streams import CORPUS, seeds


def main() -> None:
    CORPUS.mkdir(exist_ok=True)
    for old in [*CORPUS.glob("valid-*.bin")]:
        old.unlink()
    for name, script in seeds(CATALOGUE):
        (CORPUS / f"{name}.bin").write_bytes(script)


if __name__ == "__main__":
    main()
