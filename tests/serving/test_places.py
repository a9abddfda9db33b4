"""Places: whoever has the most makes room, and nothing is counted twice."""

from asynctrt.serving.places import Places


def left(gone, name):
    return lambda: gone.append(name)


def test_the_oldest_of_whoever_has_the_most_makes_room():
    places, gone = Places(4), []
    for name in ("a1", "a2", "b1", "a3"):
        places.take(name[0], name, left(gone, name))
    places.take("c", "c1", left(gone, "c1"))
    assert gone == ["a1"]
    places.take("d", "d1", left(gone, "d1"))
    assert (gone, places.taken) == (["a1", "a2"], 4)


def test_one_in_four_is_kept_for_clients_that_have_none():
    places = Places(8)
    for number in range(6):
        assert places.has_room("a")
        places.take("a", number, lambda: None)
    assert not places.has_room("a")
    assert places.has_room("b")
    places.take("b", "b1", lambda: None)
    places.take("c", "c1", lambda: None)
    assert not places.has_room("d")
    places.give_back("b", "b1")
    assert places.has_room("d")
    assert not places.has_room("c")


def test_a_place_is_given_back_once():
    places, gone = Places(2), []
    places.take("a", 1, left(gone, 1))
    places.give_back("a", 1)
    places.give_back("a", 1)
    places.give_back("b", 1)
    assert (places.taken, gone) == (0, [])
    places.free_one()
    assert places.taken == 0


def test_who_loses_a_place_may_give_it_back_as_well():
    places = Places(1)
    places.take("a", 1, lambda: places.give_back("a", 1))
    places.take("b", 2, lambda: None)
    assert places.taken == 1
