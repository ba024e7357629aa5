"""The compiler that a backend of Triton must have; interpreted kernels never reach it."""

from __future__ import annotations

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend


class Compiler(BaseBackend):
    binary_ext = "none"

    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: Any) -> NoReturn:
        raise NotImplementedError("there is no compiler for CPUs")

    def add_stages(self, stages: Any, options: Any, language: Any = None) -> NoReturn:
        raise NotImplementedError("there is no compiler for CPUs")

    def load_dialects(self, context: Any) -> None:
        pass

    def get_module_map(self) -> dict[str, Any]:
        return {}
