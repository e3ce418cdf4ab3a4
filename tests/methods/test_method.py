"""The contract of a method: the clock, capabilities and the table of methods."""

import smartprune as sp
from smartprune.methods import METHODS, capabilities
from smartprune.methods.method import Clock


def test_clock_parts_cover_the_search() -> None:
    for steps in (5, 24, 100, 101):
        for parts in (1, 3, 5):
            entered = [Clock(count, steps).enters(parts) for count in range(1, steps + 1)]
            assert [part for part in entered if part is not None] == list(range(1, parts))


def test_every_method_is_listed() -> None:
    assert list(METHODS) == ["smart", "magnitude", "gradual", "pdp", "pas", "awg", "acdc"]


def test_a_method_without_declarations_has_the_default_capabilities() -> None:
    defaults = capabilities(object())
    assert (defaults.trains_weights, defaults.needs_whole_weights) == (True, False)
    assert (defaults.straight_through, defaults.plain_autograd) == (False, False)
    assert defaults.why_not_capturable is not None


def test_declared_capabilities() -> None:
    declared = {name: capabilities(method()) for name, method in METHODS.items()}
    assert [name for name, of in declared.items() if of.needs_whole_weights] == ["pdp", "awg"]
    assert [name for name, of in declared.items() if of.plain_autograd] == ["pdp"]
    assert all(of.trains_weights and not of.straight_through for of in declared.values())
    assert capabilities(sp.Gradual(through=True)).straight_through
    assert capabilities(sp.Smart(mask_type="binary")).straight_through
    assert capabilities(sp.Smart(gain=True)).plain_autograd
    assert not capabilities(sp.Smart(train_weights=False)).trains_weights
