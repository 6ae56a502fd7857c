"""Named streams: equal names give equal draws, others do not, and nothing global is touched."""

from fedcb2o.rng import agent_streams, stream


def test_a_name_is_a_stream():
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


def test_streams_are_fixed_for_ever():
    """Another bit here makes every recorded result another one."""
    assert stream(0, "batches", 0, 0).permutation(8).tolist() == [6, 5, 2, 1, 7, 0, 3, 4]


def test_streams_of_several_agents_are_those_of_each():
    for key in ((0, "batches", 5), (3, "attack"), (7, "it's", 'a "name"')):
        found = [
            draw.integers(2**63, size=3).tolist()
            for draw in agent_streams(*key, agents=[0, 7, 12345])
        ]
        assert found == [stream(*key, j).integers(2**63, size=3).tolist() for j in (0, 7, 12345)]
