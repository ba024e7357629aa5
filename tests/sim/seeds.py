from tests.sim.kit import SEED, replayable, seeds

__all__ = ["SEED", "replayable", "seeds"]
