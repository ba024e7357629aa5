"""Rules that decide which model is awake, on the same traces in virtual time: the world, our core,
and the published rules of others."""
