"""How examples lie on clients, and who takes part in a round: pure functions, which need no model."""

from __future__ import annotations

import dataclasses

import tfpar
from tfpar.outer.federated import partition
from tfpar.outer.federated.population import Population, RoundElements
from tfpar.outer.federated.sampling import Sampling, local_order

import numpy as np
import pytest
import tensorflow as tf

LABELS = np.random.default_rng(0).integers(0, 10, 1437)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "by_class"])
def test_every_example_lies_on_one_client(kind):
    parts = {
        "iid": lambda: partition.iid(len(LABELS), 100, 3),
        "dirichlet": lambda: partition.dirichlet(LABELS, 100, 0.1, 3),
        "by_class": lambda: partition.by_class(LABELS, 100, 2, 3),
    }[kind]()
    assert len(parts) == 100
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    assert all(len(part) for part in parts)


def test_a_partition_is_a_function_of_its_seed():
    one, two, other = (partition.dirichlet(LABELS, 20, 0.5, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(first, second) for first, second in zip(one, two, strict=True))
    assert not all(np.array_equal(first, second) for first, second in zip(one, other, strict=True))


def test_a_small_alpha_gives_clients_of_few_classes_and_a_large_one_all():
    def classes(alpha: float) -> float:
        return float(np.mean([len(np.unique(LABELS[part])) for part in partition.dirichlet(LABELS, 100, alpha, 0)]))

    assert classes(0.1) < 4.0
    assert classes(1000.0) > 7.0


def test_clients_have_as_many_classes_as_asked_for():
    parts = partition.by_class(LABELS, 15, 2, 0)
    assert {len(np.unique(LABELS[part])) for part in parts} == {2}
    with pytest.raises(tfpar.ConfigError, match=r"--partition=by_class:2 with --clients=3: there are 10 classes"):
        partition.by_class(LABELS, 3, 2, 0)


def test_files_are_clients():
    parts = partition.by_file([3, 1, 2])
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3], [4, 5]]


def test_what_is_held_out_is_not_trained_on():
    parts = partition.iid(100, 7, 0)
    kept, held = partition.hold_out([*parts, np.array([200])], 0.3, 0)
    assert [len(each) for each in held] == [4, 4, 4, 4, 4, 4, 4, 0]
    assert [len(each) for each in kept][-1] == 1
    for part, one, other in zip(parts, kept, held, strict=False):
        np.testing.assert_array_equal(np.sort(np.concatenate([one, other])), part)


def test_a_round_is_a_function_of_seed_and_number():
    sampling = Sampling(seed=5, clients=50, per_round=10, dropout=0.3)
    for number in (0, 7):
        for one, other in zip(sampling.round(number), Sampling(5, 50, 10, dropout=0.3).round(number), strict=True):
            np.testing.assert_array_equal(one, other)
    assert not np.array_equal(sampling.round(0)[0], sampling.round(1)[0])
    rounds = [sampling.round(number) for number in range(300)]
    assert all(len(taking) + len(lost) == 10 for taking, lost in rounds)
    assert np.mean([len(lost) for _, lost in rounds]) == pytest.approx(3.0, abs=0.4)
    assert sampling.expected == pytest.approx(7.0)


def test_poisson_draws_each_client_by_itself():
    sampling = Sampling(seed=5, clients=40, per_round=8, kind="poisson")
    counts = np.array([len(sampling.round(number)[0]) for number in range(2000)])
    assert counts.mean() == pytest.approx(8.0, abs=0.25)
    assert counts.var() == pytest.approx(40 * 0.2 * 0.8, rel=0.15)  # binomial, not always 8
    assert sampling.most(2000) == counts.max()


def test_a_federation_without_clients_is_refused():
    source = tfpar.inputs.from_arrays(np.zeros([20, 2], np.float32), LABELS[:20], num_classes=10)
    options = {"clients": 4, "clients_per_round": 2, "rounds": 3, "client_dropout": 0.999}
    config = tfpar.ExperimentConfig.from_flat_dict(options, program="federated")
    with pytest.raises(tfpar.ConfigError, match=r"--client_dropout=0\.999 .*nothing would be learned"):
        Population.of(source, config)


def test_examples_that_would_be_skipped_are_refused():
    """Their clients would be left out instead, round after round, with all their examples."""
    x = np.zeros([20, 2], np.float32)
    x[3] = np.nan
    source = tfpar.inputs.from_arrays(x, LABELS[:20], num_classes=10, on_bad_record="skip")
    options = {"clients": 4, "clients_per_round": 2, "rounds": 3}
    config = tfpar.ExperimentConfig.from_flat_dict(options, program="federated")
    with pytest.raises(tfpar.ConfigError, match=r"arrays: on_bad_record='skip' does not work with federated averaging"):
        Population.of(source, config)


def test_a_client_sees_each_example_once_an_epoch():
    order = local_order(1, 2, 3, 7, epochs=2, batch=3, shuffle=True)
    assert order.shape == (6, 3)
    for epoch in (order[:3], order[3:]):
        assert sorted(epoch[epoch >= 0]) == list(range(7))
        assert (epoch[-1] >= 0).tolist() == [True, False, False]
    assert not np.array_equal(order[:3], order[3:])
    filled = local_order(1, 2, 3, 7, epochs=2, batch=3, shuffle=True, fill=True)
    assert filled.min() == 0
    np.testing.assert_array_equal(filled[:2], order[:2])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_replica_reads_the_examples_of_its_clients_and_no_others(replicas):
    """One client has most of the examples, and takes part in some rounds only."""
    x = np.arange(60, dtype=np.float32)[:, np.newaxis]
    source, read = tfpar.inputs.from_arrays(x, x[:, 0]), []

    def noted(indices: tf.Tensor):
        tf.numpy_function(lambda rows: read.append(rows) or np.int32(0), [indices], tf.int32)
        return source.read(indices)

    options = {"clients": 6, "clients_per_round": 3, "rounds": 4, "client_batch": 4}
    config = tfpar.ExperimentConfig.from_flat_dict(options, program="federated")
    parts = np.split(np.arange(60), [40, 44, 47, 51, 56])
    population = dataclasses.replace(
        Population.of(source, config), source=dataclasses.replace(source, read=noted), parts=parts
    )
    elements = RoundElements.of(population, replicas, rounds=4, fill=False)
    drawn = [population.sampling.round(number)[0] for number in range(4)]
    assert {0 in clients for clients in drawn} == {True, False}
    dataset = elements.dataset(0, replicas, 0)
    shares = [*dataset.take(4 * replicas).as_numpy_iterator()]
    for number, clients in enumerate(drawn):
        own = shares[number * replicas : (number + 1) * replicas]
        assert sorted(client for share in own for client in share.client if client >= 0) == clients.tolist()
        for share in own:
            assert len(share.data.x) == elements.rows < elements.slots * 40
            for place, client in enumerate(share.client[share.client >= 0]):
                rows = share.data.order[place][share.data.order[place] >= 0]
                assert sorted(share.data.x[rows, 0]) == parts[client].tolist()
                assert (share.data.weight[rows] == 1.0).all()
    expected = [sum(len(parts[client]) for client in clients) for clients in drawn]
    by_round = [sum(map(len, read[number * replicas : (number + 1) * replicas])) for number in range(4)]
    assert sorted(by_round) == sorted(expected)
    [*_, later] = dataset.take(5 * replicas).as_numpy_iterator()  # which tf.data prepares
    assert (later.client == -1).all()
