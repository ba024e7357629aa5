"""The pool: decides which models of a pod are awake. Many models share few devices.

`core/` decides and opens nothing. Who depends on it: the gateway and the engines hear it, and keep
doing what they were told last when it is dead.
"""
