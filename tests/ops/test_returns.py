import numpy as np
import pytest
import torch

from torchpod.ops.returns import discounted_sum, gae, n_step, vtrace

LENGTHS = [1, 2, 3, 7, 16, 33, 128]


def slow_discounted_sum(x, decay):
    y, total = np.zeros_like(x), np.zeros_like(x[0])
    for t in range(len(x))[::-1]:
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


@pytest.mark.parametrize("length", LENGTHS)
def test_discounted_sum_equals_the_loop(seed, length):
    rng = np.random.default_rng(seed)
    x, decay = rng.normal(size=(length, 3, 2)), rng.random((length, 3, 2)) * (rng.random((length, 3, 2)) > 0.1)
    fast = discounted_sum(torch.tensor(x), torch.tensor(decay))
    np.testing.assert_allclose(fast, slow_discounted_sum(x, decay), rtol=1e-12, atol=1e-12)
    single = discounted_sum(torch.tensor(x).float(), torch.tensor(decay).float())
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single, slow_discounted_sum(x, decay), rtol=1e-4, atol=1e-5)


def test_discounted_sum_with_decay_one_is_a_cumulative_sum_and_with_zero_nothing(seed):
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(20, 3)))
    torch.testing.assert_close(discounted_sum(x, torch.ones_like(x)), x.flip(0).cumsum(0).flip(0))
    assert torch.equal(discounted_sum(x, torch.zeros_like(x)), x)


def test_discounted_sum_refuses_shapes_that_differ():
    with pytest.raises(ValueError, match=r"of one shape, and they have \[3\] and \[4\]; expand one to the other's\."):
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


def slow_vtrace(ratio, reward, discount, is_last, v_tm1, v_t, lambda_, rho_clip, c_clip):
    """Eq. 1 of Espeholt et al. 2018 term by term, and the advantage of section 4.2."""
    length, rho, c = len(reward), np.minimum(ratio, rho_clip), lambda_ * np.minimum(ratio, c_clip)
    target, advantage = v_tm1.copy(), np.zeros_like(reward)
    for env in np.ndindex(reward.shape[1:]):
        for s in range(length):
            weight = 1.0
            for t in range(s, length):
                i = (t, *env)
                target[(s, *env)] += weight * rho[i] * (reward[i] + discount[i] * v_t[i] - v_tm1[i])
                if is_last[i]:
                    break
                weight *= discount[i] * c[i]
        for s in range(length):
            i = (s, *env)
            after = v_t[i] if is_last[i] or s == length - 1 else target[(s + 1, *env)]
            advantage[i] = rho[i] * (reward[i] + discount[i] * after - v_tm1[i])
    return target, advantage


def off_policy(seed, length):
    """As `experience`, with ratios of probabilities, and one value per timestep."""
    reward, discount, is_last, v_tm1, v_t = experience(seed, length)
    v_t[:-1] = v_tm1[1:]
    return np.exp(np.random.default_rng(seed + 1).normal(size=reward.shape)), reward, discount, is_last, v_tm1, v_t


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("lambda_", "rho_clip", "c_clip"), [(1.0, 1.0, 1.0), (0.9, 2.0, 0.7), (0.0, 1.0, 1.0)])
def test_vtrace_is_its_definition(seed, length, lambda_, rho_clip, c_clip):
    ratio, *rest = off_policy(seed, length)
    want = slow_vtrace(ratio, *rest, lambda_, rho_clip, c_clip)
    tensors = [torch.from_numpy(x) for x in (np.log(ratio), *rest)]
    got = vtrace(*tensors, lambda_=lambda_, rho_clip=rho_clip, c_clip=c_clip)
    for ours, reference in zip(got, want, strict=True):
        np.testing.assert_allclose(ours.numpy(), reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", LENGTHS)
def test_whatever_stands_in_the_rows_of_resets_vtrace_and_gae_of_all_others_are_those_of_their_episode(seed, length):
    """Trajectories as the loops make them, LAST -> FIRST and all, beside each episode alone."""
    rng = np.random.default_rng(seed)
    ratio, reward, discount, is_last, v_tm1, v_t = off_policy(seed, length)
    resets = np.zeros_like(is_last)
    resets[0] = rng.random(is_last.shape[1]) < 0.2
    for t in range(1, length):
        resets[t] = is_last[t - 1]
        is_last[t] &= ~resets[t]  # a reset leads to FIRST
    ratio, reward = np.where(resets, np.exp(9 * rng.normal(size=ratio.shape)), ratio), np.where(resets, 1e6, reward)
    discount = np.where(resets, rng.random(reward.shape), discount)
    tensors = [torch.from_numpy(x) for x in (reward, discount, is_last, v_tm1, v_t)]
    settings = {"lambda_": 0.9, "rho_clip": 1.5, "c_clip": 0.7}
    got = [*vtrace(torch.from_numpy(np.log(ratio)), *tensors, **settings), gae(*tensors, lambda_=0.9)]
    for env in range(reward.shape[1]):
        ends = [-1, *np.flatnonzero(resets[:, env]), length]
        for before, after in zip(ends, ends[1:], strict=False):
            own = slice(before + 1, after), slice(env, env + 1)
            rest = [x[own] for x in (reward, discount, is_last, v_tm1, v_t)]
            want = [*slow_vtrace(ratio[own], *rest, **settings), slow_gae(*rest, 0.9)]
            for ours, reference in zip(got, want, strict=True):
                np.testing.assert_allclose(ours.numpy()[own], reference, rtol=1e-9, atol=1e-9)


def test_on_policy_vtrace_is_the_n_step_return(seed):
    """Up to the end of the episode, or of the trajectory: there the value goes on."""
    _, reward, discount, is_last, v_tm1, v_t = off_policy(seed, 16)
    want = np.zeros_like(reward)
    for env in range(reward.shape[1]):
        for s in range(16):
            weight = 1.0
            for t in range(s, 16):
                want[s, env] += weight * reward[t, env]
                weight *= discount[t, env]
                if is_last[t, env] or t == 15:
                    want[s, env] += weight * v_t[t, env]
                    break
    tensors = [torch.from_numpy(x) for x in (np.zeros_like(reward), reward, discount, is_last, v_tm1, v_t)]
    target, advantage = vtrace(*tensors)
    np.testing.assert_allclose(target.numpy(), want, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(advantage.numpy(), want - v_tm1, rtol=1e-10, atol=1e-10)


def slow_n_step(reward, discount, is_last, g):
    """Of one environment, in float64: adds until the episode ends, or the window."""
    total, factor, steps = 0.0, 1.0, 0
    for r, alive, last in zip(reward, discount, is_last, strict=True):
        total += factor * r
        factor *= g * alive
        steps += 1
        if last:
            break
    return total, factor, steps


@pytest.mark.parametrize("length", [1, 2, 3, 5, 10])
def test_n_step_adds_up_rewards_until_the_episode_ends(seed, length):
    """Terminations and truncations anywhere, also at the end; several in a window, as LAST, FIRST, ..., LAST."""
    rng = np.random.default_rng(seed)
    size = 1000
    is_last = rng.random((length, size)) < 0.25
    discount = np.where(is_last & (rng.random((length, size)) < 0.5), 0.0, 1.0)
    reward = rng.normal(size=(length, size))
    got = n_step(*map(torch.from_numpy, (reward, discount, is_last)), discount=0.9)
    want = [slow_n_step(*(x[:, i] for x in (reward, discount, is_last)), 0.9) for i in range(size)]
    for ours, reference in zip(got, zip(*want, strict=True), strict=True):
        np.testing.assert_allclose(ours.numpy(), np.array(reference), rtol=1e-12, atol=1e-12)
    assert got[2].dtype == torch.int64
    ends = is_last.argmax(0)[is_last.any(0)]
    assert (ends == length - 1).any() and (length == 1 or (ends == 0).any() and (is_last.sum(0) > 1).any())
    tensor = n_step(
        *map(torch.from_numpy, (reward, discount, is_last)), discount=torch.tensor(0.9, dtype=torch.float64)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, tensor, strict=True))


@pytest.mark.parametrize(
    ("discount", "is_last", "want"),
    [
        ([1, 1, 1], [0, 0, 0], (1 + 2 * 0.5 + 4 * 0.25, 0.125, 3)),  # goes on: from the value after three steps
        ([1, 0, 1], [0, 1, 0], (1 + 2 * 0.5, 0.0, 2)),  # terminated inside: no value, and nothing of the next episode
        ([1, 1, 1], [0, 1, 0], (1 + 2 * 0.5, 0.25, 2)),  # truncated inside: the value of the true last observation
        ([1, 1, 0], [0, 0, 1], (1 + 2 * 0.5 + 4 * 0.25, 0.0, 3)),  # terminated exactly at the end
        ([1, 1, 1], [0, 0, 1], (1 + 2 * 0.5 + 4 * 0.25, 0.125, 3)),  # truncated exactly at the end
        ([1, 1, 0], [1, 0, 1], (1.0, 0.5, 1)),  # LAST, FIRST, LAST: truncated, then another that terminates
        ([0, 1, 1], [1, 0, 1], (1.0, 0.0, 1)),  # and the other way round
    ],
)
def test_n_step_at_the_ends_of_episodes(discount, is_last, want):
    tensors = [torch.tensor(x, dtype=torch.float32)[:, None] for x in ([1, 2, 4], discount)]
    got = n_step(*tensors, torch.tensor(is_last)[:, None] == 1, discount=0.5)
    assert tuple(x.item() for x in got) == pytest.approx(want)
