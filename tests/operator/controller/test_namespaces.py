"""Which namespaces an operator has seen, and what it says of those that it cannot read."""

from shoal_operator.controller.namespaces import Namespaces


class Opened:
    """Counts how often a namespace was opened that was closed."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def test_one_that_was_never_listed_as_a_whole_is_not_seen() -> None:
    namespaces = Namespaces(("a", "b"), Opened())
    namespaces.open("a")
    namespaces.close("b", "forbidden")
    assert [namespaces.is_seen(each) for each in ("a", "b")] == [True, False]


def test_one_that_was_seen_stays_as_it_was_when_it_cannot_be_read_any_more() -> None:
    namespaces = Namespaces(("a",), Opened())
    namespaces.open("a")
    namespaces.close("a", "forbidden")
    assert namespaces.is_seen("a")
    assert namespaces.closed == ("a",)


def test_where_all_namespaces_are_listed_together_each_is_seen() -> None:
    namespaces = Namespaces((), Opened())
    assert namespaces.scopes == ("",)
    assert not namespaces.is_seen("any")
    namespaces.open("")
    assert namespaces.is_seen("any")


def test_what_is_closed_is_named_until_it_is_open_and_then_all_is_looked_at_again() -> None:
    opened = Opened()
    namespaces = Namespaces(("a", "b", "c"), opened)
    assert namespaces.problem() is None
    namespaces.close("b", "forbidden (403)")
    namespaces.close("c", "forbidden (403)")
    problem = namespaces.problem()
    assert problem is not None
    assert problem.startswith("namespace b (and 1 more) cannot be read: forbidden (403); ")
    assert opened.times == 0
    namespaces.open("b")
    namespaces.open("c")
    assert (namespaces.problem(), opened.times) == (None, 2)
