"""Trajectories with TorchRL's keys: nothing is lost, and TorchRL reads them as we do."""

import re

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.utils import _pytree as pytree
from torchrl.data import ListStorage, ReplayBuffer
from torchrl.objectives.value import GAE

from tests.contracts.test_alignment import Names, Scribe
from torchpod import random
from torchpod.agent import variables_of
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.envs.classic.cartpole import CartPole
from torchpod.interop import to_tensordict, to_trajectory
from torchpod.rollout import make_step, start, unroll
from torchpod.types import ActorOutput, TimeStep, Trajectory

T, B = 64, 16


def collect(agent, env, seed):
    env_keys, actor_keys = (random.split(random.key(seed + i), B) for i in range(2))
    params, buffers = variables_of(agent)
    carry = start(agent, env, env_keys)
    return unroll(make_step(agent, env), params | buffers, carry, env_keys, actor_keys, length=T)[1]


def assert_equal(a, b):
    pytree.tree_map(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), a, b)


def part(trajectory, envs):
    steps = pytree.tree_map(lambda x: x[:, envs], trajectory[:2])
    return Trajectory(*steps, *pytree.tree_map(lambda x: x[envs], trajectory[2:]))


def of_trees(seed):
    """Observations, rewards and actions that are dicts."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.rand(*shape, generator=generator)

    names = ("left", "right")
    step_type = (3 * draw(T + 1, B)).to(torch.int32)
    reward = {name: draw(T + 1, B, 2) for name in names}
    discount = {name: (draw(T + 1, B, 2) > 0.3).float() for name in names}
    observation = {"image": (255 * draw(T + 1, B, 3, 3, 1)).to(torch.uint8), "mask": draw(T + 1, B, 4) > 0.5}
    extras = {"raw_reward": reward, "game_over": draw(T + 1, B) > 0.9}
    output = ActorOutput({name: draw(T, B, 2) for name in names}, {"action_log_prob": draw(T, B)})
    state = draw(B, 5)
    return Trajectory(TimeStep(step_type, reward, discount, observation, extras), output, state, state + 1)


@pytest.mark.parametrize("make", [lambda s: collect(PPO(CartPole().spec), CartPole(max_episode_steps=7), s), of_trees])
def test_a_trajectory_comes_back_as_it_went(seed, make):
    trajectory = make(seed)
    states = trajectory[2:]
    assert_equal(to_trajectory([to_tensordict(trajectory)], *states), trajectory)
    assert_equal(to_trajectory(to_tensordict(trajectory), *states), trajectory)
    parts = [to_tensordict(part(trajectory, envs)) for envs in (slice(0, 1), slice(1, 4), slice(4, B))]
    assert_equal(to_trajectory(parts, *states), trajectory)


def test_the_keys_and_shapes_are_those_of_torchrl(seed):
    agent = PPO(CartPole().spec, PPOConfig(recurrent=5))
    trajectory = collect(agent, CartPole(max_episode_steps=7), seed)
    steps = to_tensordict(trajectory)
    assert isinstance(steps, TensorDict) and steps.batch_size == (B, T)
    for key in ("reward", "done", "terminated", "truncated", "is_init"):
        assert steps[key].shape == steps["next", key].shape == (B, T, 1)
        assert torch.equal(steps["next", key][:, :-1], steps[key][:, 1:])
    assert steps["state_value"].shape == (B, T, 1)
    assert steps["action_log_prob"].shape == (B, T) and steps["action"].dtype == torch.int64
    assert torch.equal(steps["done"], steps["terminated"] | steps["truncated"])
    assert torch.equal(steps["done"], steps["next", "is_init"])  # an episode begins after one that ended
    assert torch.equal(steps["terminated"][..., 0], steps["discount"] == 0)
    assert steps["observation"].data_ptr() == trajectory.timestep.observation.data_ptr()
    shift = trajectory.timestep.observation[1].data_ptr()
    assert steps["next", "observation"].data_ptr() == shift


def test_torchrl_computes_our_advantages_from_it(seed):
    torch.manual_seed(seed)
    env = CartPole(max_episode_steps=18)  # some episodes end by themselves, some by the limit
    agent = PPO(env.spec, PPOConfig(hidden=(8,), discount=0.9, gae_lambda=0.8))
    trajectory = collect(agent, env, seed)
    steps = agent.prepare(trajectory, random.split(random.key(seed), B)).steps
    data = to_tensordict(trajectory)
    with torch.no_grad():
        final = pytree.tree_map(lambda x: x[-1], trajectory.timestep)
        bootstrap = agent.act(final, (), random.split(random.key(seed), B))[0].extras["state_value"]
    following = torch.cat([data["state_value"][:, 1:], bootstrap.view(B, 1, 1)], 1)
    data["next", "state_value"] = following
    nothing = TensorDictModule(torch.nn.Identity(), in_keys=["state_value"], out_keys=["state_value"])
    GAE(gamma=0.9, lmbda=0.8, value_network=nothing, skip_existing=True)(data)
    real = steps["weight"] > 0
    assert 0 < data["next", "truncated"].sum() and 0 < data["next", "terminated"].sum()
    for name in ("advantage", "value_target"):
        want = data[name].squeeze(-1).transpose(0, 1)
        torch.testing.assert_close(steps[name][real], want[real], rtol=1e-5, atol=1e-5)


def test_a_replay_buffer_of_torchrl_holds_trajectories_without_a_copy_and_gives_them_back(seed):
    trajectory = collect(PPO(CartPole().spec), CartPole(max_episode_steps=7), seed)
    buffer = ReplayBuffer(storage=ListStorage(3), batch_size=1, collate_fn=lambda items: items)
    buffer.extend([to_tensordict(trajectory)])
    (held,) = buffer.sample()
    for key in ("observation", "reward", "action"):
        source = trajectory.output.action if key == "action" else getattr(trajectory.timestep, key)
        assert held[key].data_ptr() == source.data_ptr(), key
    assert held["next", "observation"].data_ptr() == trajectory.timestep.observation[1].data_ptr()
    again = to_trajectory([held], *trajectory[2:])
    assert_equal(again, trajectory)
    for mine, source in zip(pytree.tree_leaves(again), pytree.tree_leaves(trajectory), strict=True):
        assert mine.data_ptr() == source.data_ptr() and mine.stride() == source.stride()


@pytest.mark.parametrize("make", [lambda s: collect(PPO(CartPole().spec), CartPole(max_episode_steps=7), s), of_trees])
def test_what_lies_elsewhere_in_memory_is_copied_into_a_trajectory(seed, make):
    trajectory = make(seed)
    steps = to_tensordict(trajectory)
    for held in (steps.clone(), steps.contiguous(), steps.clone(recurse=False)):
        assert_equal(to_trajectory([held], *trajectory[2:]), trajectory)
    last = steps.clone(recurse=False)
    last["next", "game_over"] = steps["game_over"]  # the same memory, and not one step behind
    game_over = trajectory.timestep.extras["game_over"]
    want = torch.cat([game_over[:-1], game_over[T - 1 : T]])
    assert torch.equal(to_trajectory([last]).timestep.extras["game_over"], want)
    short = to_tensordict(part(trajectory, slice(1, 4)))  # some of the environments
    assert_equal(to_trajectory([short], *(s[1:4] for s in trajectory[2:])), part(trajectory, slice(1, 4)))


def test_a_name_that_is_taken_is_refused(seed):
    trajectory = collect(Scribe(), Names(), seed)
    extras = trajectory.output.extras
    for name in ("done", "action", "next"):
        output = trajectory.output._replace(extras={**extras, name: extras["memory"]})
        with pytest.raises(ValueError, match=f"the agent's extras\\['{name}'\\] has the name of a key of TorchRL"):
            to_tensordict(trajectory._replace(output=output))


def both(steps, key, change):
    """Changes a key now and in the next step."""
    return steps.set(key, change(steps[key])).set(("next", key), change(steps["next", key]))


REFUSED = {
    "no step type": (
        lambda first, steps: [first, steps.exclude("step_type")],
        "part 1 has no 'step_type' of shape [B, T, ...], but ['reward', ",
    ),
    "no action": (lambda first, steps: [first, steps.exclude("action")], "part 1 has no 'action' of shape [B, T, ...]"),
    "no next": (
        lambda first, steps: [first, steps.exclude("next")],
        "part 1 has no ('next', 'step_type') of shape [B, T, ...]",
    ),
    "no value in part 1": (
        lambda first, steps: [first, steps.exclude("state_value")],
        "part 1 has no 'state_value' of shape [B, T, ...]",
    ),
    "no value in part 0": (
        lambda first, steps: [steps.exclude("state_value"), first],
        "part 0 has no 'state_value' of shape [B, T, ...]",
    ),
    "next alone": (
        lambda first, steps: [steps.set(("next", "weight"), steps["discount"])],
        "part 0 has no 'weight' of shape [B, T, ...]",
    ),
    "a next observation in parts": (
        lambda first, steps: [steps.set("next", steps["next"].set("observation", {"x": steps["observation"]}))],
        "part 0 has no ('observation', 'x') of shape [B, T, ...]",
    ),
    "an observation in parts": (
        lambda first, steps: [steps.set("observation", {"x": steps["observation"]})],
        "part 0 has no ('next', 'observation', 'x') of shape [B, T, ...]",
    ),
    "reward without its axis": (
        lambda first, steps: [first, steps.set("reward", steps["discount"])],
        "part 1: 'reward' has shape [16, 64], and must have [B, T, ..., 1]; unsqueeze(-1) it.",
    ),
    "discount with an axis": (
        lambda first, steps: [both(steps, "discount", lambda x: x[..., None])],
        "part 0: 'discount' is torch.float32 of shape [16, 64, 1], and must be torch.float32 of shape [16, 64]; give ",
    ),
    "step type with an axis": (
        lambda first, steps: [both(steps, "step_type", lambda x: x[..., None])],
        "part 0: 'step_type' is torch.int32 of shape [16, 64, 1], and must be torch.int32 of shape [16, 64]; give ",
    ),
    "another observation": (
        lambda first, steps: [first, both(steps, "observation", lambda x: x[..., :3])],
        "part 1: 'observation' is torch.float32 of shape [16, 64, 3], and must be torch.float32 of shape [16, 64, 4]",
    ),
    "another next observation": (
        lambda first, steps: [steps.set(("next", "observation"), steps["observation"][..., :3])],
        "part 0: ('next', 'observation') is torch.float32 of shape [16, 64, 3], and must be ",
    ),
    "other actions": (
        lambda first, steps: [first, steps.set("action", steps["action"] + 0.5)],
        "part 1: 'action' is torch.float32 of shape [16, 64], and must be torch.int64 of shape [16, 64]",
    ),
    "fewer steps": (
        lambda first, steps: [first, steps[:, :5]],
        "part 1 has batch size [16, 5], and must have [B, 64]; give all parts as many steps as part 0.",
    ),
    "rows": (lambda first, steps: [steps.reshape(-1)], "part 0 has batch size [1024], and must have [B, T]; give all "),
    "time first": (
        lambda first, steps: [steps.transpose(0, 1)],
        "part 0: ('next', 'step_type') must be 'step_type' one step later along axis 1 of [64, 16], and is not",
    ),
    "steps in another order": (
        lambda first, steps: [steps[:, torch.arange(T).flip(0)]],
        "part 0: ('next', 'step_type') must be 'step_type' one step later along axis 1 of [16, 64], and is not",
    ),
    "nothing": (lambda first, steps: [], "to_trajectory needs at least one TensorDict of to_tensordict, and got none."),
    "something else": (
        lambda first, steps: [first, steps.to_dict()],
        "part 1 is a dict; give to_trajectory what to_tensordict returns.",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_trajectory_is_refused(seed, what):
    parts, told = REFUSED[what]
    steps = to_tensordict(collect(PPO(CartPole().spec, PPOConfig(hidden=(8,))), CartPole(max_episode_steps=7), seed))
    with pytest.raises(ValueError, match=re.escape(told)):
        to_trajectory(parts(steps, steps.clone(recurse=False)))
