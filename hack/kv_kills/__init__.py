"""Kills engines at the seams of a step and compares what their successors make of the KV blocks.

`inside` is loaded by the pod's processes, `seams` says from outside when one of them dies, `pod` is
the pod under load, `report` what was found.
"""
