"""Goal: ids and file names that nothing can misuse. Method: valid and invalid ones."""

import pytest

from lockserver.core.names import INCARNATION, name_of, new_incarnation
from plumbing.errors import UsageError


def test_new_incarnation_is_an_incarnation_of_its_engine():
    """Goal: ids that `name_of` accepts, each new. Method: two for one engine."""
    one, other = new_incarnation("engine-0"), new_incarnation("engine-0")
    assert one != other
    assert [INCARNATION.fullmatch(each)["engine"] for each in (one, other)] == ["engine-0"] * 2
    assert name_of("engine-0-00112233445566aa") == "witness_engine-0_00112233445566aa"


@pytest.mark.parametrize("bad", ["", "-a", "a/b", "a" * 64, "a b"])
def test_bad_engine_id_has_no_incarnation(bad):
    """Goal: no path tricks through engine ids. Method: invalid ones."""
    with pytest.raises(UsageError) as caught:
        new_incarnation(bad)
    assert caught.value.code == "engine.bad_id"


@pytest.mark.parametrize("bad", ["", "engine-0", "../x-00112233445566aa", "e-00112233445566AA"])
def test_bad_incarnation_has_no_witness(bad):
    """Goal: no path tricks through incarnations. Method: invalid ones."""
    with pytest.raises(UsageError) as caught:
        name_of(bad)
    assert caught.value.code == "engine.bad_incarnation"
