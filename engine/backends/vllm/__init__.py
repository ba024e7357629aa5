"""The vLLM backend: the engine that people run. Needs vLLM; this package alone imports without."""
