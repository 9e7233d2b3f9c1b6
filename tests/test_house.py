"""The house does not grow: no size is above its ceiling in house.toml."""

from tests.house import ceilings, sizes


def test_no_size_is_above_its_ceiling() -> None:
    now, most = sizes(), ceilings()
    above = {
        f"{kind} of {name}": (size, most[kind].get(name, 0))
        for kind, of in now.items()
        for name, size in of.items()
        if size > most[kind].get(name, 0)
    }
    assert not above, f"more than the ceilings of house.toml: {above}; a capability lives in one place"
