"""Preparation of a seed: the same models and data for a subset of agents as for all agents."""

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
from fedcb2o.federated.local_update import plan_training_batches

SUBSET = [1, 3, 4]
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


def prepare(**changes):
    experiment = load(tiny(**changes))
    return prepare_seed(experiment, 1000, load_dataset(experiment, None))


@pytest.mark.parametrize("initialisation", ["common", "independent"])
@pytest.mark.parametrize(
    "algorithm", [tiny()["algorithm"], {"name": "ifca", "models": 2}], ids=["fedcb2o", "ifca"]
)
def test_a_subset_of_agents_has_the_same_initial_models(initialisation, algorithm):
    prepared = prepare(agents={"initialisation": initialisation}, algorithm=algorithm)
    all_models = empty_models(prepared.num_persistent_rows, prepared.spec.dim)
    subset_models = empty_models(len(SUBSET), prepared.spec.dim)
    init_models_(
        all_models,
        prepared.experiment,
        prepared.seed,
        prepared.dataset,
        range(prepared.num_persistent_rows),
    )
    init_models_(subset_models, prepared.experiment, prepared.seed, prepared.dataset, SUBSET)
    assert subset_models.equal(all_models[SUBSET])
    different = len(all_models.unique(dim=0))
    assert different == (
        prepared.num_persistent_rows
        if initialisation == "independent"
        else 1 + prepared.num_persistent_rows - prepared.spec.num_agents
    )


def test_a_subset_of_agents_has_the_same_data():
    prepared, cpu = prepare(), torch.device("cpu")
    all_data = prepared.build_agent_data(range(prepared.spec.num_agents), cpu)
    subset_data = prepared.build_agent_data(SUBSET, cpu)
    for k, j in enumerate(SUBSET):
        for actual, expected in zip(
            subset_data.training_data(np.array([k]), 0)
            + subset_data.gather(np.array([k]), subset_data.validation),
            all_data.training_data(np.array([j]), 0)
            + all_data.gather(np.array([j]), all_data.validation),
            strict=True,
        ):
            assert actual.equal(expected)
    assert subset_data.malicious.tolist() == [all_data.malicious[j] for j in SUBSET]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"together": 9}, [[0, 2], [1, 3], [4]]), ({}, [[0, 2], [1], [3], [4]])],
    ids=["any network", "small dense networks on a CPU"],
)
def test_agents_with_the_same_number_of_batches_train_together(changes, expected):
    # batches of 8 samples
    assert plan_training_batches(prepare(**changes).spec, [8, 9, 8, 16, 17]) == expected


def test_redrawn_test_samples_are_balanced_unused_by_agents_and_differ_between_seeds():
    experiment = load(tiny(evaluate_on="redrawn"))
    dataset = load_dataset(experiment, None)
    pool = shared_pool(experiment, dataset)
    assert len(pool) == 1797  # including the test set
    seeds = [prepare_seed(experiment, seed, dataset) for seed in (0, 1)]
    tests = [
        {tuple(x.flatten().tolist()) for x in prepared.scored_samples().x} for prepared in seeds
    ]
    for prepared, drawn in zip(seeds, tests, strict=True):
        assert torch.bincount(prepared.scored_samples().y).tolist() == [24] * 10
        agent_samples = torch.cat([*prepared.population.train, *prepared.population.validation])
        assert not drawn & {tuple(x.flatten().tolist()) for x in pool.x[agent_samples]}
    assert len(tests[0] & tests[1]) < 80  # of 240 samples; by chance 1 in 7 is in both


def test_no_agent_has_redrawn_test_images_in_any_rotation(tmp_path):
    """The pool has 8 different images per class, the test set 2."""
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
        prepared = prepare_seed(experiment, seed, dataset)
        assert torch.bincount(prepared.scored_samples().y).tolist() == [2] * 10
        agent_data = prepared.build_agent_data(range(prepared.spec.num_agents), torch.device("cpu"))
        tests = [
            set(map(bytes, test.x.numpy()))
            for _, test in agent_data.test_sets(np.arange(len(agent_data.agents)))
        ]
        assert [len(test) for test in tests] == [20] * 4
        agent_images = [
            agent_data.training_data(np.array([j]), 0)[0][0]
            for j in range(prepared.spec.num_agents)
        ]
        agent_images += [
            agent_data.gather(np.array([j]), agent_data.validation)[0][0]
            for j in range(prepared.spec.num_agents)
        ]
        distinct_images = set(map(bytes, torch.cat(agent_images).numpy()))
        # all other images, in the rotation of each cluster
        assert len(distinct_images) == 4 * (2 * 25 + 30)
        assert not distinct_images & set.union(*tests)
        drawn.append(tests[0])
    assert drawn[0] != drawn[1]


def test_redrawn_test_samples_of_a_table_are_unused_by_agents():
    experiment = load(tiny(**TABLE))
    dataset = load_dataset(experiment, None)
    first, second = (prepare_seed(experiment, seed, dataset) for seed in (0, 1))
    for prepared in (first, second):
        assert torch.bincount(prepared.scored_samples().y).tolist() == [53, 89]
        sample_ids = torch.cat(
            [
                *prepared.population.train,
                *prepared.population.validation,
                prepared.population.tuning,
            ]
        )
        assert len(sample_ids) == len(sample_ids.unique()) == 7 * 30 + 3 * 30 + 142
    assert not first.scored_samples().x.equal(second.scored_samples().x)


def test_test_samples_are_drawn_before_agent_samples():
    message = r"= 2 \* 700 \+ 1 \* 200 = 1600, and the pool has 1557 samples"
    with pytest.raises(ConfigError, match=message):
        prepare(evaluate_on="redrawn", agents={"benign_samples": 700, "malicious_samples": 200})
