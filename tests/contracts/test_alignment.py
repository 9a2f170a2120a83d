"""What is learned from which step: numbers worked out by hand, and an environment that names its steps."""

import itertools

import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, variables_of
from torchpod.algos.a2c import A2C, A2CConfig
from torchpod.algos.impala import IMPALA, IMPALAConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin, train
from torchpod.compile import Compiler
from torchpod.env import TensorEnv
from torchpod.learner import Learner, LearnerConfig
from torchpod.rollout import make_step, start, unroll
from torchpod.specs import Array, Discrete, EnvSpec
from torchpod.types import FIRST, LAST, MID, ActorOutput, Batch, LossOutput, TimeStep, Trajectory

SPEC = EnvSpec("by_hand", observation=Array((1,)), action=Discrete(2))


def by_hand(reset_action=0, reset_log_prob=-0.5, first_reward=0.0, first_discount=1.0):
    """Two environments that differ in one number: the first one terminates at t = 2, the second is truncated there.

    t            0      1      2      3      4
    step_type    MID    MID    LAST   FIRST  MID
    reward              2      1      0      4
    discount            1      0|1    1      1
    state_value  1      3      7      2      (5, the bootstrap)
    """
    step_type = torch.tensor([MID, MID, LAST, FIRST, MID], dtype=torch.int32)[:, None].expand(5, 2).contiguous()
    reward = torch.tensor([0.0, 2.0, 1.0, first_reward, 4.0])[:, None].expand(5, 2).contiguous()
    discount = torch.ones(5, 2)
    discount[2, 0], discount[3] = 0.0, first_discount
    observation = torch.arange(10.0).view(5, 2, 1) / 10
    timestep = TimeStep(
        step_type, reward, discount, observation, {"raw_reward": reward, "game_over": step_type == LAST}
    )
    action = torch.tensor([[0, 1], [1, 1], [reset_action] * 2, [1, 0]])
    log_prob = torch.tensor([[-0.7, -0.6], [-0.8, -0.7], [reset_log_prob] * 2, [-0.6, -0.9]])
    value = torch.tensor([1.0, 3.0, 7.0, 2.0])[:, None].expand(4, 2).contiguous()
    return Trajectory(timestep, ActorOutput(action, {"action_log_prob": log_prob, "state_value": value}), (), ())


def value_is_5(**config):
    """PPO with gamma = 1/2 and lambda = 1/2 whose value of anything is 5."""
    agent = PPO(SPEC, PPOConfig(hidden=(4,), discount=0.5, gae_lambda=0.5, **config))
    with torch.no_grad():
        agent.value.weight.zero_()
        agent.value.bias.fill_(5.0)
    return agent


def test_truncation_bootstraps_from_the_final_observation_but_termination_does_not():
    agent = value_is_5()
    steps = agent.prepare(by_hand(), torch.zeros(2, 3, dtype=torch.int64)).steps
    # delta_0 = 2 + 1/2 * 3 - 1 = 2.5
    # delta_1 = 1 + 0   * 7 - 3 = -2   where it terminated: the 7 plays no part
    #         = 1 + 1/2 * 7 - 3 = 1.5  where it was truncated: 7 is the value of the true final observation
    # delta_3 = 4 + 1/2 * 5 - 2 = 4.5  with the bootstrap 5
    # A_1 = delta_1, for the episode ends there; A_0 = delta_0 + 1/2 * 1/2 * A_1; A_3 = delta_3
    advantage = steps["advantage"][[0, 1, 3]]
    assert advantage[:, 0].tolist() == [2.5 + 0.25 * -2.0, -2.0, 4.5]
    assert advantage[:, 1].tolist() == [2.5 + 0.25 * 1.5, 1.5, 4.5]
    # target = A + V: the terminated step must learn its reward, 1, and nothing else
    assert steps["value_target"][[0, 1, 3], 0].tolist() == [3.0, 1.0, 6.5]
    assert steps["value_target"][[0, 1, 3], 1].tolist() == [3.875, 4.5, 6.5]
    assert steps["weight"].tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]


def test_a_trajectory_that_ends_at_a_truncation_bootstraps_from_its_last_observation():
    short = by_hand()
    cut = Trajectory(
        pytree.tree_map(lambda x: x[:3], short.timestep), pytree.tree_map(lambda x: x[:2], short.output), (), ()
    )
    advantage = value_is_5().prepare(cut, torch.zeros(2, 3, dtype=torch.int64)).steps["advantage"]
    # delta_1 = 1 - 3 = -2 terminated, 1 + 1/2 * 5 - 3 = 0.5 truncated, with 5 for the value of timestep 2
    assert advantage[1].tolist() == [-2.0, 0.5]
    assert advantage[0].tolist() == [2.5 - 0.5, 2.5 + 0.125]


@pytest.mark.parametrize("recurrent", [0, 5])
@pytest.mark.parametrize(("cls", "config"), [(PPO, PPOConfig), (A2C, A2CConfig), (IMPALA, IMPALAConfig)])
def test_the_reset_row_contributes_nothing_to_loss_or_gradient(seed, cls, config, recurrent):
    torch.manual_seed(seed)
    agent = cls(SPEC, config(hidden=(4,), recurrent=recurrent, discount=0.5))
    config = LearnerConfig(num_epochs=2, num_minibatches=2, learning_rate=0.1)
    learner = Learner(agent, config, num_iterations=1)
    state = learner.init(*variables_of(agent))
    keys = random.split(random.key(seed), 2)
    memory = torch.rand(2, 5) if recurrent else ()

    def update(**changes):
        trajectory = by_hand(**changes)._replace(actor_state=memory, last_actor_state=memory)
        return learner.update(state, trajectory, keys)

    plain = update()
    changed = update(reset_action=1, reset_log_prob=-3.0, first_reward=100.0, first_discount=0.3)
    for a, b in zip(pytree.tree_leaves(plain), pytree.tree_leaves(changed), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(plain[0].params["policy.weight"], state.params["policy.weight"])


def test_the_loss_is_the_mean_over_the_six_transitions_alone(seed):
    torch.manual_seed(seed)
    agent = value_is_5(value_clip=False, normalize_advantage=False)
    learner = Learner(agent, LearnerConfig(num_epochs=1, num_minibatches=1), num_iterations=1)
    _, metrics = learner.update(learner.init(*variables_of(agent)), by_hand(), random.split(random.key(seed), 2))
    # 1/2 (5 - target)^2 with the targets worked out above: 3, 1, 6.5 and 3.875, 4.5, 6.5
    squares = [(5 - t) ** 2 / 2 for t in (3.0, 1.0, 6.5, 3.875, 4.5, 6.5)]
    assert metrics["value_loss"].item() == pytest.approx(sum(squares) / 6, rel=1e-6)


class Names(TensorEnv):
    """Observation: (environment's name, step of the episode). Reward: 10 * step + action of the transition.

    Terminates where name + step is a multiple of 11; truncated after 7.
    """

    spec = EnvSpec("names", observation=Array((2,)), action=Discrete(5), max_episode_steps=7)

    def reset(self, keys):
        name = random.bits(keys, 1)[..., 0] % 100_000  # 100 * name is exact in float32
        return torch.stack([name, torch.zeros_like(name)], -1)

    def transition(self, state, action, keys):
        reward = (10 * state[:, 1] + action).float()
        return state + torch.tensor([0, 1]), reward, state.sum(-1) % 11 == 0

    def observe(self, state):
        return state.float()


class Scribe(Agent):
    """Acts at random, and writes down what it saw: "log-prob" = 100 * name + step, "value" = -step."""

    def initial_state(self, batch_size):
        return torch.zeros(batch_size)

    def act(self, timestep, state, keys, explore=True):
        name, step = timestep.observation.unbind(-1)
        action = random.to_integer(random.bits(keys, 1)[..., 0], 5)
        state = torch.where(timestep.step_type == FIRST, 0.0, state) + 1
        return ActorOutput(action, {"action_log_prob": 100 * name + step, "state_value": -step, "memory": state}), state


class Checker(Scribe):
    """Keeps the batches that its loss sees; has something to learn."""

    max_lag = None

    def __init__(self, recurrent=False):
        super().__init__()
        self.weight, self.batches, self.recurrent = torch.nn.Parameter(torch.zeros(1)), [], recurrent

    def prepare(self, trajectory, keys):
        t, out = trajectory.timestep, trajectory.output
        steps = {
            "step_type": t.step_type[:-1],
            "observation": t.observation[:-1],
            "log_prob": out.extras["action_log_prob"],
            "memory": out.extras["memory"],
            "action": out.action,
            "reward": t.reward[1:],
            "discount": t.discount[1:],
            "weight": (t.step_type[:-1] != LAST).float(),
        }
        return Batch(steps, trajectory.actor_state)

    def loss(self, batch, keys, target):
        self.batches.append(batch)
        return LossOutput((self.weight * batch.steps["weight"]).sum(), {})


def assert_rows_line_up(batches):
    """In each row all columns must name one step, and a recurrent state the first one of its sequence."""
    for b, actor_state, _ in batches:
        name, step = b["observation"].unbind(-1)
        learned = b["weight"] > 0
        assert torch.equal(learned, b["step_type"] != LAST)
        assert torch.equal(b["log_prob"], 100 * name + step)
        assert torch.equal(b["memory"], step + 1)
        assert torch.equal(b["reward"][learned], (10 * step + b["action"])[learned])
        assert torch.equal((b["discount"] == 0)[learned], ((name + step) % 11 == 0)[learned])
        assert b["weight"].sum().item() == pytest.approx(1.0)
        if name.ndim == 2:
            goes_on = b["step_type"][0] != FIRST
            assert torch.equal(actor_state[goes_on], step[0][goes_on])


def learned_from(learner):
    """The trajectories of updates yet to come."""
    trajectories, update = [], learner.update

    def spy(state, trajectory, *rest):
        trajectories.append(pytree.tree_map(torch.clone, trajectory))
        return update(state, trajectory, *rest)

    learner.update = spy
    return trajectories


def assert_iterations_line_up(trajectories, carries):
    """Every trajectory, and that it begins at one carry and ends at the next; all episodes have names of their own."""
    for trajectory, (before, after) in zip(trajectories, itertools.pairwise(carries), strict=True):
        assert_lines_up(trajectory)
        assert torch.equal(trajectory.actor_state, before.actor_state)
        assert torch.equal(trajectory.last_actor_state, after.actor_state)
        for x, y, z in zip(*map(pytree.tree_leaves, (trajectory.timestep, before[1], after[1])), strict=True):
            assert torch.equal(x[0], y) and torch.equal(x[-1], z)
    ended = sum(int((trajectory.timestep.step_type[1:] == LAST).sum()) for trajectory in trajectories)
    assert ended > len(carries[0].timestep.step_type)
    assert torch.cat([x.timestep.observation[..., 0] for x in trajectories]).unique().numel() >= ended


def assert_lines_up(tr):
    """Every number of a trajectory of the scribe names the environment and the step that it belongs to."""
    step_type, observation, action = tr.timestep.step_type, tr.timestep.observation, tr.output.action
    reset = step_type[:-1] == LAST
    named = 10 * observation[:-1, :, 1] + action
    assert torch.equal(tr.timestep.reward[1:], torch.where(reset, 0.0, named))
    assert torch.equal(tr.output.extras["action_log_prob"], 100 * observation[:-1, :, 0] + observation[:-1, :, 1])
    assert torch.equal(tr.output.extras["state_value"], -observation[:-1, :, 1])
    assert torch.equal(step_type[1:] == FIRST, reset)
    # the reset shows the next episode's first observation, any other step the next step of the same episode
    assert torch.equal(observation[1:, :, 1], torch.where(reset, 0.0, observation[:-1, :, 1] + 1))
    assert torch.equal((observation[1:] == observation[:-1])[..., 0] | reset, torch.ones_like(reset))
    is_last, count = step_type == LAST, observation[..., 1]
    truncated = is_last & (tr.timestep.discount == 1)
    assert (count[truncated] == 7).all() and (count <= 7).all()
    assert ((tr.timestep.discount == 0) <= is_last).all()
    # a recurrent state that counts acts since FIRST; the state after the last act is the carry's
    assert torch.equal(tr.output.extras["memory"], observation[:-1, :, 1] + 1)
    assert torch.equal(tr.last_actor_state, tr.output.extras["memory"][-1])


def test_rewards_actions_and_log_probs_of_a_trajectory_line_up(seed):
    agent, env, size = Scribe(), Names(), 16
    env_keys, actor_keys = (random.split(random.key(seed + i), size) for i in range(2))
    carry, done = start(agent, env, env_keys), 0
    for _ in range(3):
        before = carry
        carry, tr = unroll(make_step(agent, env), {}, carry, env_keys, actor_keys, length=11)
        step_type, action = tr.timestep.step_type, tr.output.action
        assert step_type.shape == (12, size) and action.shape == (11, size)
        for x, y, z in zip(*map(pytree.tree_leaves, (tr.timestep, before.timestep, carry.timestep)), strict=True):
            assert torch.equal(x[0], y) and torch.equal(x[-1], z)
        assert_lines_up(tr)
        assert torch.equal(tr.actor_state, before.actor_state)
        # which draw is whose: action t of the unroll comes from the counter of step t + 1
        for t in range(11):
            keys = random.at(actor_keys, before.step + t + 1)
            assert torch.equal(action[t], random.to_integer(random.bits(keys, 1)[..., 0], 5))
        done += int((step_type == LAST).sum())
    assert done > size


def test_two_short_unrolls_equal_one_long_one(seed):
    agent, env, size = Scribe(), Names(), 4
    keys = tuple(random.split(random.key(seed + i), size) for i in range(2))
    step, carry = make_step(agent, env), start(agent, env, keys[0])
    end, long = unroll(step, {}, carry, *keys, length=10)
    middle, first = unroll(step, {}, carry, *keys, length=4)
    last, second = unroll(step, {}, middle, *keys, length=6)
    pytree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), end, last)
    for whole, a, b in zip(*(pytree.tree_leaves(x.output) for x in (long, first, second)), strict=True):
        assert torch.equal(whole, torch.cat([a, b]))
    assert torch.equal(long.timestep.reward, torch.cat([first.timestep.reward, second.timestep.reward[1:]]))


@pytest.mark.parametrize("recurrent", [False, True])
def test_what_anakin_learns_from_lines_up(seed, recurrent):
    agent, config = Checker(recurrent), LearnerConfig(num_epochs=2, num_minibatches=4)
    anakin = Anakin(
        lambda: agent,
        Names(),
        num_envs=8,
        unroll_length=12,
        learner=config,
        num_iterations=4,
        compiler=Compiler(enabled=False),
    )
    state, trajectories = anakin.init(seed), learned_from(anakin.learner)
    carries = [state.carry]
    for _, program in train(anakin, state):
        carries.append(pytree.tree_map(torch.clone, program.state.carry))
    assert_iterations_line_up(trajectories, carries)
    assert_rows_line_up(agent.batches)
    assert len(agent.batches) == 4 * config.num_epochs * config.num_minibatches
