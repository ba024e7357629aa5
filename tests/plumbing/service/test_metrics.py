"""Goal: zeros from the first scrape, no noise, states as one-hot gauges, and a page that Prometheus
reads.

Method: the parser of Prometheus's own library reads each page."""

import math
import os

from prometheus_client.parser import text_string_to_metric_families

from plumbing.service.metrics import Metrics, Tally


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
    locks = {"lock": ("active:a", "active:b")}
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


def test_a_histogram_has_what_is_at_most_each_bound_and_values_at_a_bound_are_in_it():
    metrics = Metrics()
    tallies = metrics.histogram("wait_seconds", "h", ("of",), lambda: Tally((0.1, 1.0)))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        tallies.labels(of="a").observe(seconds)
    name = "understudy_wait_seconds"
    bounds = {le: value(metrics, f"{name}_bucket", of="a", le=le) for le in ("0.1", "1.0", "+Inf")}
    assert bounds == {"0.1": 2, "1.0": 3, "+Inf": 4}
    assert value(metrics, f"{name}_count", of="a") == 4
    assert value(metrics, f"{name}_sum", of="a") == 7.65


def test_any_text_and_any_number_can_be_read():
    metrics = Metrics()
    text = 'a "quoted" \\ path\nof two lines'
    numbers = metrics.gauge("numbers", text, ("of",))
    for number in (math.inf, -1.5, 1e300, 2**53):
        numbers.labels(of=text).set(number)
        assert value(metrics, "understudy_numbers", of=text) == number
    numbers.labels(of=text).set(math.nan)
    assert math.isnan(value(metrics, "understudy_numbers", of=text))


def test_a_page_has_the_figures_of_its_process():
    page, began = Metrics(), os.times()
    of = "understudy_process"
    assert value(page, f"{of}_cpu_seconds_total") >= began.user
    assert value(page, f"{of}_start_time_seconds") <= os.stat("/proc/self/stat").st_atime
    assert 0 < value(page, f"{of}_open_fds") < value(page, f"{of}_max_fds")
    resident, virtual = (
        value(page, f"{of}_{kind}_memory_bytes") for kind in ("resident", "virtual")
    )
    assert 0 < resident < virtual
