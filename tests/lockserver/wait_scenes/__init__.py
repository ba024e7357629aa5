"""How each state that can last is made, with real servers and real processes, and what `status`
must tell of it.

A scene is an async context manager: it makes its state, yields a `Told`, and leaves the rest to
whoever looks. Rooms are by what is waited for; `scene.py` has what they share.
"""
