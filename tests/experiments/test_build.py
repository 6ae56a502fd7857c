"""What a seed is prepared of: the same for all agents at once and for some of them."""

import numpy as np
import pytest
import torch
from tests.data.image_files import contents, write
from tests.tiny import empty_models, tiny

from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config.datasets import load_dataset, shared_pool
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.config.network import init_models_
from fedcb2o.experiments.config.prepared_seed import prepare_seed
from fedcb2o.federated import plan_training_batches

SOME = [1, 3, 4]
TABLE = {
    "evaluate_on": "redrawn",
    "data": {"name": "breast_cancer"},
    "agents": {
        "num_clusters": 1,
        "benign": 7,
        "malicious": 3,
        "benign_samples": 30,
        "malicious_samples": 30,
    },
    "attack": {"name": "label_flip", "source": 0, "target": 1},
}


def prepared(**changes):
    experiment = load(tiny(**changes))
    return prepare_seed(experiment, 1000, load_dataset(experiment, None))


@pytest.mark.parametrize("initialisation", ["common", "independent"])
@pytest.mark.parametrize(
    "algorithm", [tiny()["algorithm"], {"name": "ifca", "models": 2}], ids=["fedcb2o", "ifca"]
)
def test_the_first_models_of_some_are_those_of_all(initialisation, algorithm):
    made = prepared(agents={"initialisation": initialisation}, algorithm=algorithm)
    every, some = (
        empty_models(made.num_persistent_rows, made.spec.dim),
        empty_models(len(SOME), made.spec.dim),
    )
    init_models_(every, made.experiment, made.seed, made.dataset, range(made.num_persistent_rows))
    init_models_(some, made.experiment, made.seed, made.dataset, SOME)
    assert some.equal(every[SOME])
    different = len(every.unique(dim=0))
    assert different == (
        made.num_persistent_rows
        if initialisation == "independent"
        else 1 + made.num_persistent_rows - made.spec.num_agents
    )


def test_what_some_hold_is_what_they_hold_among_all():
    made, cpu = prepared(), torch.device("cpu")
    every, some = (
        made.build_agent_data(range(made.spec.num_agents), cpu),
        made.build_agent_data(SOME, cpu),
    )
    for k, j in enumerate(SOME):
        for mine, theirs in zip(
            some.training_data(np.array([k]), 0) + some.gather(np.array([k]), some.validation),
            every.training_data(np.array([j]), 0) + every.gather(np.array([j]), every.validation),
            strict=True,
        ):
            assert mine.equal(theirs)
    assert some.malicious.tolist() == [every.malicious[j] for j in SOME]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"together": 9}, [[0, 2], [1, 3], [4]]), ({}, [[0, 2], [1], [3], [4]])],
    ids=["any network", "small dense networks on a CPU"],
)
def test_agents_with_equally_many_batches_train_together(changes, expected):
    assert plan_training_batches(prepared(**changes).spec, [8, 9, 8, 16, 17]) == expected  # of 8


def test_redrawn_test_samples_are_each_seeds_own_balanced_and_held_by_nobody():
    experiment = load(tiny(evaluate_on="redrawn"))
    dataset = load_dataset(experiment, None)
    pool = shared_pool(experiment, dataset)
    assert len(pool) == 1797  # the test set is among them
    seeds = [prepare_seed(experiment, seed, dataset) for seed in (0, 1)]
    tests = [{tuple(x.flatten().tolist()) for x in made.scored_samples().x} for made in seeds]
    for made, drawn in zip(seeds, tests, strict=True):
        assert torch.bincount(made.scored_samples().y).tolist() == [24] * 10
        held = torch.cat([*made.population.train, *made.population.validation])
        assert not drawn & {tuple(x.flatten().tolist()) for x in pool.x[held]}
    assert len(tests[0] & tests[1]) < 80  # of 240, 1 in 7 by chance


def test_redrawn_test_images_are_held_by_nobody_turned_or_not(tmp_path):
    """A pool and a test set of different sizes: 8 and 2 different images per class."""
    experiment = load(
        tiny(
            evaluate_on="redrawn",
            data={"name": "fashion_mnist"},
            agents={"num_clusters": 4, "benign_samples": 25},
        )
    )
    dataset = load_dataset(experiment, write(tmp_path, contents(train=8, test=2)))
    drawn = []
    for seed in (0, 1):
        made = prepare_seed(experiment, seed, dataset)
        assert torch.bincount(made.scored_samples().y).tolist() == [2] * 10
        everybody = made.build_agent_data(range(made.spec.num_agents), torch.device("cpu"))
        tests = [
            set(map(bytes, test.x.numpy()))
            for _, test in everybody.test_sets(np.arange(len(everybody.agents)))
        ]
        assert [len(test) for test in tests] == [20] * 4
        seen = [
            everybody.training_data(np.array([j]), 0)[0][0] for j in range(made.spec.num_agents)
        ]
        seen += [
            everybody.gather(np.array([j]), everybody.validation)[0][0]
            for j in range(made.spec.num_agents)
        ]
        held = set(map(bytes, torch.cat(seen).numpy()))
        assert len(held) == 4 * (2 * 25 + 30)  # all others, as each cluster sees them
        assert not held & set.union(*tests)
        drawn.append(tests[0])
    assert drawn[0] != drawn[1]


def test_redrawn_samples_of_a_table():
    experiment = load(tiny(**TABLE))
    dataset = load_dataset(experiment, None)
    first, second = (prepare_seed(experiment, seed, dataset) for seed in (0, 1))
    for made in (first, second):
        assert torch.bincount(made.scored_samples().y).tolist() == [53, 89]
        whose = torch.cat(
            [*made.population.train, *made.population.validation, made.population.tuning]
        )
        assert len(whose) == len(whose.unique()) == 7 * 30 + 3 * 30 + 142
    assert not first.scored_samples().x.equal(second.scored_samples().x)


def test_test_samples_are_drawn_before_agents_get_theirs():
    with pytest.raises(
        ConfigError, match=r"= 2 \* 700 \+ 1 \* 200 = 1600, and the pool has 1557 samples"
    ):
        prepared(evaluate_on="redrawn", agents={"benign_samples": 700, "malicious_samples": 200})
