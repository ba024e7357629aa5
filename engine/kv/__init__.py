"""The index of a KV pool: which blocks of KV memory that outlives its engine may be believed.

Pure: it works on a memoryview, knows no vLLM, numpy, sockets or clock, and both backends use it.
`layout` is the memory; `writer` the rules for the engine that holds the pool, and which step proves
which block; `adopter` the rules for its successor.
"""
