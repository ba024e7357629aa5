"""How each state that can last is produced, with real servers and real processes, and what `status`
must report about it.

A scene is an async context manager: it produces its state, yields a `Told`, and leaves the checks
to the test. Modules are grouped by what is waited for; `scene.py` has what they share.
"""
