"""Goal: zeros from the first scrape, no noise, and states as one-hot gauges."""

from prometheus_client.parser import text_string_to_metric_families

from plumbing.service.metrics import Metrics


def samples(metrics):
    """Every sample of a scrape: (name, labels) → value."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(metrics, name, **labels):
    return samples(metrics)[(name, frozenset(labels.items()))]


def test_known_label_values_are_zeros_before_anything_happened():
    """Goal: never absent, no noise, one prefix; method: scrape at once."""
    metrics = Metrics()
    locks = {"lock": ("active", "loader")}
    metrics.counter("lock_grants_total", "h", locks)
    metrics.histogram("lock_wait_duration_seconds", "h", locks)
    for lock in locks["lock"]:
        assert value(metrics, "understudy_lock_grants_total", lock=lock) == 0
        assert value(metrics, "understudy_lock_wait_duration_seconds_count", lock=lock) == 0
    names = {name for name, _ in samples(metrics)}
    assert not [name for name in names if name.endswith("_created")]
    assert [name for name in names if not name.startswith("understudy_")] == []


def test_one_hot_has_every_state_and_at_most_one():
    """Goal: `{state="…"}` sums to one; method: set two states in turn, for two engines."""
    metrics = Metrics()
    known = {"engine_id": ("engine-0", "engine-1")}
    state = metrics.one_hot("engine_state", "h", ("init", "standby"), known)

    def seen(engine):
        return {
            each: value(metrics, "understudy_engine_state", engine_id=engine, state=each)
            for each in ("init", "standby")
        }

    assert seen("engine-0") == {"init": 0, "standby": 0}
    state.set("init", engine_id="engine-0")
    state.set("standby", engine_id="engine-0")
    assert seen("engine-0") == {"init": 0, "standby": 1}
    assert seen("engine-1") == {"init": 0, "standby": 0}
