"""Episodes are recorded as the evaluation plays them, step by step, and NumPy alone reads them."""

import numpy as np
import pytest
import torch

from tests.render.boat import Boat
from tests.test_evaluate import Fours, Lives, make
from torchpod import random
from torchpod.agent import bind, variables_of
from torchpod.algos.multi_agent import IPPO, IPPOConfig
from torchpod.env import HostEnv
from torchpod.envs import CartPole, CovidEconomy, TagContinuous, TagGridWorld
from torchpod.envs.transforms import FrameStack, RewardClip
from torchpod.evaluate import evaluate
from torchpod.metrics import short
from torchpod.recording import arrays_of, record_episode, save_recording
from torchpod.types import TimeStep
from torchpod.watched import watched

TAG = {"num_taggers": 2, "num_runners": 3, "num_other_agents_observed": 2, "tagging_distance": 0.2, "grid_length": 5.0}


def many(env, seed):
    torch.manual_seed(seed)
    agent = IPPO(env.spec, IPPOConfig(hidden=(8,)))
    params, buffers = variables_of(agent)
    return agent, params | buffers


def replayed(env, arrays, key, num_episodes, groups=None):
    """What the environment says when the recorded actions are taken again, step by step."""
    keys = random.split(random.split(key, 2)[0], num_episodes)[:1]
    state, timestep = env.init(random.at(keys, torch.tensor(0)))
    yield timestep, state
    for i in range(len(arrays["step_type"]) - 1):
        if groups is None:
            action = torch.from_numpy(arrays["action"][i : i + 1])
        else:
            action = {g: torch.from_numpy(arrays[f"action/{g}"][i : i + 1]) for g in groups}
        state, timestep = env.step(state, action, random.at(keys, torch.tensor(i + 1)))
        yield timestep, state


def test_the_recorded_actions_lead_through_the_recorded_states(seed):
    env = TagContinuous(**TAG, max_episode_steps=70)
    groups = env.spec.groups or {}
    agent, variables = many(env, seed)
    key = random.key(seed)
    arrays = arrays_of(env, record_episode(agent, env, variables, key, num_episodes=3, explore=True))
    score = evaluate(agent, env, variables, key, num_episodes=3, explore=True)
    length = int(score.lengths[0])
    assert arrays["state/x"].shape == (length + 1, 5) and arrays["alive/runner"].shape == (length + 1, 3)
    assert arrays["action/runner"].shape == (length, 3, 2) and arrays["action/tagger"].dtype == np.int64
    assert arrays["observation/tagger"].shape == (length + 1, 2, 15) and arrays["game_over"].nonzero()[0].tolist() == [
        length
    ]
    total = sum(arrays[f"raw_reward/{g}"].mean(1).sum() for g in groups)
    assert total == pytest.approx(float(score.returns[0]), abs=1e-4)
    for i, (timestep, (state, _, _)) in enumerate(replayed(env, arrays, key, 3, groups)):
        assert arrays["step_type"][i] == timestep.step_type
        for g in groups:
            for name in ("observation", "reward", "discount"):
                np.testing.assert_array_equal(arrays[f"{name}/{g}"][i], getattr(timestep, name)[g][0])
            np.testing.assert_array_equal(arrays[f"alive/{g}"][i], timestep.extras["alive"][g][0])
        for name in state._fields:
            np.testing.assert_array_equal(arrays[f"state/{name}"][i], getattr(state, name)[0])


def test_numpy_reads_the_file_without_pickle_and_nothing_else_is_left(tmp_path, seed):
    env = CovidEconomy(max_episode_steps=9)
    agent, variables = many(env, seed)
    recording = record_episode(agent, env, variables, random.key(seed), num_episodes=1)
    path = tmp_path / "new" / "episode.npz"
    line = save_recording(path, env, recording)
    arrays = np.load(path, allow_pickle=False)
    assert line == f"{path}: 9 steps in {len(arrays)} arrays, return {short(float(recording.rewards.sum()))}"
    assert [file.name for file in path.parent.iterdir()] == ["episode.npz"]
    assert arrays["observation/governor/action_mask"].shape == (10, 51, 11)
    assert arrays["state/infected"].shape == (10, 51) and arrays["state/day"].tolist() == list(range(10))
    assert arrays["episode/deaths"].shape == (10,) and arrays["action/planner"].shape == (9, 1)
    assert arrays["agent/governor/action_log_prob"].shape == arrays["agent/governor/state_value"].shape == (9, 51)


def test_a_file_that_cannot_be_written_is_named_and_the_one_before_stays(tmp_path, seed, monkeypatch):
    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    env = CovidEconomy(max_episode_steps=9)
    agent, variables = many(env, seed)
    recording = record_episode(agent, env, variables, random.key(seed), num_episodes=1)
    path = tmp_path / "episode.npz"
    path.write_bytes(b"before")
    monkeypatch.setattr(np, "savez_compressed", full)
    for name in (path, path / "x.npz"):
        with pytest.raises(OSError) as raised:
            save_recording(name, env, recording)
        assert raised.value.filename == str(name)
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_an_episode_of_one_agent_is_recorded_behind_its_transforms(seed):
    env = FrameStack(RewardClip(CartPole(max_episode_steps=100), 0.0, 0.5), 2)
    agent, variables = make(env, seed)
    arrays = arrays_of(env, record_episode(agent, env, variables, random.key(seed), num_episodes=2))
    score = evaluate(agent, env, variables, random.key(seed), num_episodes=2)
    length = int(score.lengths[0])
    assert arrays["reward"].tolist() == [0.0] + [0.5] * length and arrays["raw_reward"].sum() == length
    seen = TimeStep(*(torch.from_numpy(arrays[name][:-1]) for name in TimeStep._fields[:-1]), {})
    output, _ = bind(agent, variables).act(seen, (), random.split(random.key(0), length), explore=False)
    assert {name for name in arrays if name.startswith("agent/")} == {f"agent/{name}" for name in output.extras}
    for name, x in output.extras.items():
        np.testing.assert_allclose(arrays[f"agent/{name}"], x, rtol=1e-5, atol=1e-6)
    for i, (timestep, ((state, _, _), _)) in enumerate(
        (t, s[0]) for t, s in replayed(env, arrays, random.key(seed), 2)
    ):
        np.testing.assert_array_equal(arrays["observation"][i], timestep.observation[0])
        np.testing.assert_array_equal(arrays["state"][i], state[0])


def test_an_environment_that_overrides_step_is_recorded_by_the_state_of_its_reset(seed):
    env = RewardClip(Boat())
    agent, variables = make(env, seed)
    arrays = arrays_of(env, record_episode(agent, env, variables, random.key(seed), num_episodes=1))
    assert {name for name in arrays if name.startswith("state")} == {"state/current", "state/place"}
    for name in ("current", "place"):
        np.testing.assert_array_equal(arrays[f"state/{name}"], arrays[f"observation/{name}"])


def test_a_host_environment_is_recorded_without_its_state(seed):
    agent, variables = make(Lives(), seed)
    tensor, host = (
        arrays_of(env, record_episode(agent, env, variables, random.key(seed), num_episodes=3))
        for env in (Lives(), HostEnv(Lives()))
    )
    assert {name for name in tensor if not name.startswith("state/")} == set(host)
    for name in host:
        np.testing.assert_array_equal(host[name], tensor[name])
    assert (host["step_type"] == 0).sum() == 2 and host["game_over"].sum() == 1  # two lives, one end


@pytest.mark.parametrize("num_episodes", [3, 9])
def test_the_first_row_of_several_is_recorded(num_episodes, seed):
    agent, variables = make(Lives(), seed)
    one, first = (
        arrays_of(env, record_episode(agent, env, variables, random.key(seed), num_episodes=num_episodes))
        for env in (HostEnv(Lives()), watched(FrameStack(Fours(Lives()), 1), "a recording", 60.0))
    )
    assert one.keys() == first.keys()
    for name in one:  # a product of matrices may round otherwise with more rows
        np.testing.assert_allclose(first[name], one[name], rtol=1e-5, atol=1e-6)


def test_greedy_and_drawn_actions_differ_and_both_repeat(seed):
    env = TagGridWorld(max_episode_steps=40)
    agent, variables = many(env, seed)

    def actions(explore):
        recording = record_episode(agent, env, variables, random.key(seed), num_episodes=1, explore=explore)
        return recording.action["tagger"]

    assert torch.equal(actions(True), actions(True)) and torch.equal(actions(False), actions(False))
    assert not torch.equal(actions(True), actions(False))


def test_names_of_the_table_are_not_for_extras(seed):
    class Named(CartPole):
        def extras(self, state):
            return {"state": state.x if hasattr(state, "x") else torch.zeros(1)}

    env = Named(max_episode_steps=3)
    agent, variables = make(env, seed)
    with pytest.raises(ValueError, match=r"extras\['state'\] of cartpole has the name of another array; rename it\."):
        arrays_of(env, record_episode(agent, env, variables, random.key(seed), num_episodes=1))
