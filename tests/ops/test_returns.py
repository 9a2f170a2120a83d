import numpy as np
import pytest
import torch

from torchpod.ops.returns import discounted_sum, gae

LENGTHS = [1, 2, 3, 7, 16, 33, 128]


def slow_discounted_sum(x, decay, reverse):
    y, total = np.zeros_like(x), np.zeros_like(x[0])
    order = range(len(x))[::-1] if reverse else range(len(x))
    for t in order:
        total = x[t] + decay[t] * total
        y[t] = total
    return y


def slow_gae(reward, discount, is_last, v_tm1, v_t, lambda_):
    """The sum of eq. 16 of Schulman et al. 2016, term by term."""
    length, advantage = len(reward), np.zeros_like(reward)
    for t in range(length):
        for env in np.ndindex(reward.shape[1:]):
            weight = 1.0
            for k in range(t, length):
                i = (k, *env)
                advantage[(t, *env)] += weight * (reward[i] + discount[i] * v_t[i] - v_tm1[i])
                if is_last[i]:
                    break
                weight *= lambda_ * discount[i]
    return advantage


def experience(seed, length, size=5):
    """Rewards, discounts (0.9, 0 where terminated), ends (terminations and truncations), values before and after."""
    rng = np.random.default_rng(seed)
    terminated = rng.random((length, size)) < 0.1
    is_last = terminated | (rng.random((length, size)) < 0.1)
    reward, v_tm1, v_t = rng.normal(size=(3, length, size))
    return reward, np.where(terminated, 0.0, 0.9), is_last, v_tm1, v_t


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_discounted_sum_equals_the_loop(seed, length, reverse):
    rng = np.random.default_rng(seed)
    x, decay = rng.normal(size=(length, 3, 2)), rng.random((length, 3, 2)) * (rng.random((length, 3, 2)) > 0.1)
    fast = discounted_sum(torch.tensor(x), torch.tensor(decay), reverse=reverse)
    np.testing.assert_allclose(fast, slow_discounted_sum(x, decay, reverse), rtol=1e-12, atol=1e-12)
    single = discounted_sum(torch.tensor(x).float(), torch.tensor(decay).float(), reverse=reverse)
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single, slow_discounted_sum(x, decay, reverse), rtol=1e-4, atol=1e-5)


def test_discounted_sum_with_decay_one_is_a_cumulative_sum_and_with_zero_nothing(seed):
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(20, 3)))
    torch.testing.assert_close(discounted_sum(x, torch.ones_like(x), reverse=False), x.cumsum(0))
    assert torch.equal(discounted_sum(x, torch.zeros_like(x)), x)


def test_discounted_sum_refuses_shapes_that_differ():
    with pytest.raises(ValueError, match=r"x has shape \(3,\), decay \(4,\)"):
        discounted_sum(torch.zeros(3), torch.zeros(4))


def test_discounted_sum_has_the_right_gradients_and_maps(seed):
    generator = torch.Generator().manual_seed(seed)
    x, decay = torch.rand(2, 6, 2, dtype=torch.float64, generator=generator).requires_grad_().unbind(0)
    assert torch.autograd.gradcheck(discounted_sum, (x, decay))
    many = torch.rand(4, 6, 2, generator=generator), torch.rand(4, 6, 2, generator=generator)
    single = torch.stack([discounted_sum(a, b) for a, b in zip(*many, strict=True)])
    assert torch.equal(torch.vmap(discounted_sum)(*many), single)


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("length", LENGTHS)
def test_gae_equals_the_double_sum_of_the_paper(seed, length, lambda_):
    data = experience(seed, length, size=3)
    fast = gae(*map(torch.tensor, data), lambda_=lambda_)
    np.testing.assert_allclose(fast, slow_gae(*data, lambda_), rtol=1e-11, atol=1e-11)
    float32 = [torch.tensor(x) if x.dtype == bool else torch.tensor(x, dtype=torch.float32) for x in data]
    tensor = torch.tensor(lambda_)
    assert torch.equal(gae(*float32, lambda_=tensor), gae(*float32, lambda_=float(tensor)))


def test_gae_with_lambda_0_is_the_one_step_error(seed):
    reward, discount, is_last, v_tm1, v_t = experience(seed, 30)
    advantage = gae(*map(torch.tensor, (reward, discount, is_last, v_tm1, v_t)), lambda_=0.0)
    np.testing.assert_allclose(advantage, reward + discount * v_t - v_tm1, rtol=1e-12)


def test_gae_with_lambda_1_is_the_return_to_the_end_of_the_episode_minus_the_value(seed):
    reward, discount, is_last, v_tm1, _ = experience(seed, 30)
    bootstrap = np.random.default_rng(seed + 1).normal(size=(30, 5))
    # Inside an episode the value after t is the value before t + 1, as in a trajectory; at its end it is free.
    v_t = np.where(is_last, bootstrap, np.concatenate([v_tm1[1:], bootstrap[-1:]]))
    advantage = gae(*map(torch.tensor, (reward, discount, is_last, v_tm1, v_t)), lambda_=1.0)
    for env in range(5):
        for t in range(30):
            total, weight = 0.0, 1.0
            for k in range(t, 30):
                total += weight * reward[k, env]
                weight *= discount[k, env]
                if is_last[k, env] or k == 29:
                    total += weight * v_t[k, env]
                    break
            np.testing.assert_allclose(advantage[t, env], total - v_tm1[t, env], rtol=1e-10, atol=1e-12)


def test_gae_bootstraps_from_truncations_but_not_from_terminations():
    args = {"reward_t": torch.tensor([1.0]), "is_last_t": torch.tensor([True]), "v_tm1": torch.tensor([2.0])}
    terminated = gae(discount_t=torch.tensor([0.0]), v_t=torch.tensor([100.0]), lambda_=0.9, **args)
    truncated = gae(discount_t=torch.tensor([0.5]), v_t=torch.tensor([100.0]), lambda_=0.9, **args)
    assert terminated.tolist() == [1 - 2] and truncated.tolist() == [1 + 0.5 * 100 - 2]
