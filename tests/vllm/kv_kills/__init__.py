"""Kills engines at the seams of a step and compares what their successors make of the KV blocks.

`inside` is loaded by the engine's processes, `seams` says from outside when one of them dies,
the program runs the lives and judges them.
"""
