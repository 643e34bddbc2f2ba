"""Where requests go: by the tokens that lie before each engine, without those it has cached."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.engine.router import Route, Router

SIZE = 4
LONG = list(range(100, 140))  # ten pages


def test_equals_take_turns():
    router = Router([8, 8, 8], SIZE, turn=1)
    routes = [router.route(range(3), [token], None, 5) for token in range(6)]
    assert [route.engine for route in routes] == [1, 2, 0, 1, 2, 0]
    assert router.load == (12, 12, 12)


def test_a_prefix_goes_where_it_is_until_waiting_costs_more_than_it_saves():
    router = Router([64, 64], SIZE)
    first = router.route(range(2), [*LONG, 1], None, 1)
    router.end(first)
    again = router.route(range(2), [*LONG, 2], None, 10)
    assert (again.engine, again.prompt) == (first.engine, 1)
    busy = router.route(range(2), [*LONG, 3], None, 30)  # 11 tokens wait, 40 are saved
    assert (busy.engine, busy.prompt) == (first.engine, 1)
    elsewhere = router.route(range(2), [*LONG, 4], None, 1)  # 42 wait
    assert (elsewhere.engine, elsewhere.prompt) == (1 - first.engine, 41)
    router.end(elsewhere)
    assert router.route(range(2), [*LONG, 5], None, 1).engine == elsewhere.engine, "both hold it"


def test_other_salts_and_forgotten_pages_attract_nothing():
    router = Router([64, 64], SIZE)
    router.end(router.route(range(2), LONG, None, 1))
    router.end(router.route(range(2), LONG, "salt", 1))
    assert router.route(range(2), LONG, "salt", 1).prompt == 0
    router.forget(0)
    router.forget(1)
    assert router.route(range(2), LONG, "salt", 1).prompt == len(LONG)


def test_what_an_engine_holds_is_as_small_as_its_pool():
    router = Router([3, 3], SIZE)
    router.end(router.route([0], LONG, None, 1))
    again = router.route([0], LONG, None, 1)
    assert again.prompt == len(LONG) - 3 * SIZE, "the beginning is what stays"
    router.end(router.route([0], list(range(2 * SIZE)), None, 1))
    assert router.route([0], LONG, None, 1).prompt == len(LONG) - SIZE


Step = tuple[int, int, int]  # prompt's family and length, output
steps = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 30)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 4), pages=st.integers(0, 20), given_steps=steps, random=st.randoms())
def test_nobody_waits_behind_more_than_the_prefix_saves(
    count: int, pages: int, given_steps: list[Step], random
):
    router = Router([pages] * count, SIZE)
    running: list[Route] = []
    for family, length, output in given_steps:
        living = sorted(random.sample(range(count), random.randint(1, count)))
        prompt = [family * 1000 + at for at in range(length)]
        before = router.load
        route = router.route(living, prompt, None, output)
        assert route.engine in living
        assert 0 <= route.prompt <= length
        saved = length - route.prompt
        assert saved <= pages * SIZE and saved % SIZE == 0
        assert before[route.engine] - min(before[engine] for engine in living) <= saved
        assert router.load[route.engine] == before[route.engine] + route.prompt + output
        running.append(route)
        while running and random.random() < 0.4:
            ended = running.pop(random.randrange(len(running)))
            if random.random() < 0.5:
                router.prompt_done(ended)
            router.end(ended)
            router.end(ended)
    for route in running:
        router.end(route)
    assert router.load == (0,) * count
