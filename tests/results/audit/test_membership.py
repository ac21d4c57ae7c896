"""Loss threshold and RMIA on known losses."""

from __future__ import annotations

import numpy as np
import pytest

from flare_sparse.results.audit.membership import OFFLINE_SHIFT, choose_scale, compute_rmia_scores, guess_below_mean


def test_losses_up_to_the_mean_training_loss_are_members() -> None:
    losses, is_member = np.array([0.0, 2.0, 1.0, 1.5]), np.array([True, True, False, False])
    assert guess_below_mean(losses, is_member).tolist() == [True, False, True, False]


def test_rmia_ranks_as_the_share_of_dominated_likelihood_ratios() -> None:
    generator = np.random.default_rng(0)
    losses, references = generator.exponential(size=30), generator.exponential(size=(4, 30))
    is_in = np.arange(30) % 2 == np.array([[0], [1], [0], [1]])
    # Equation 3 as the paper writes it: the mean of p_in and p_out.
    likelihoods = np.exp(-references)
    p_in, p_out = ([likelihoods[rows[:, x], x].mean() for x in range(30)] for rows in (is_in, ~is_in))
    ratio = np.exp(-losses) / ((np.array(p_in) + np.array(p_out)) / 2)
    population = np.arange(15)
    share = np.array([np.mean(ratio[x] / ratio[population] >= 1) for x in range(30)])
    scores = compute_rmia_scores(losses, references, is_in)
    assert scores == pytest.approx(np.log(ratio))
    assert (np.diff(share[np.argsort(scores)]) >= 0).all()


def test_rmia_without_models_of_the_example_uses_the_offline_estimate() -> None:
    losses, references = np.array([0.3, 0.6]), np.array([[1.0, 0.1]])
    scores = compute_rmia_scores(losses, references, np.zeros((1, 2), dtype=bool))
    prior = (1 + OFFLINE_SHIFT) / 2 * np.exp(-references[0]) + (1 - OFFLINE_SHIFT) / 2
    assert scores == pytest.approx(-losses - np.log(prior))


def test_rmia_finds_hard_members_that_the_loss_hides() -> None:
    # Members are harder than the others, but their losses fell below those of the reference models.
    losses = np.array([2.0, 2.1, 2.2, 1.1, 1.2, 1.4])
    references = np.array([[3.0, 3.1, 3.2, 1.0, 1.1, 1.2]] * 2)
    is_in, is_member = np.array([[True] * 6, [False] * 6]), np.arange(6) < 3
    scores = compute_rmia_scores(losses, references, is_in)
    assert scores[is_member].min() > scores[~is_member].max()


def test_scale_is_one_for_cross_entropies_and_the_mean_for_errors() -> None:
    assert choose_scale("binary", np.array([[4.0]])) == 1.0
    assert choose_scale("regression", np.array([[3.0, 5.0]])) == 4.0
    assert choose_scale("regression", np.zeros((1, 2))) == 1.0
