"""Named streams: equal names give equal draws, and different names give different draws."""

from fedcb2o.rng import agent_streams, stream


def test_equal_names_give_equal_draws():
    draws = [stream(3, "batches", 5, 7).integers(2**63, size=4).tolist() for _ in range(2)]
    assert draws[0] == draws[1]


def test_names_do_not_collide():
    names = [
        (0, "a"),
        (1, "a"),
        (0, "b"),
        (0, "a", 1),
        (0, "a", 11),
        (0, "a", 1, 1),
        (0, "a", "1"),
        (0, "a", "1", 1),
    ]
    assert len({tuple(stream(*name).integers(2**63, size=2).tolist()) for name in names}) == len(
        names
    )


def test_the_draws_of_a_name_are_fixed():
    """Other values here would change every recorded result."""
    assert stream(0, "batches", 0, 0).permutation(8).tolist() == [6, 5, 2, 1, 7, 0, 3, 4]


def test_streams_of_several_agents_equal_the_stream_of_each():
    for key in ((0, "batches", 5), (3, "attack"), (7, "it's", 'a "name"')):
        draws = [
            draw.integers(2**63, size=3).tolist()
            for draw in agent_streams(*key, agents=[0, 7, 12345])
        ]
        assert draws == [stream(*key, j).integers(2**63, size=3).tolist() for j in (0, 7, 12345)]
