"""A policy as a TensorDictModule, and as a program of torch.export: the agent's own greedy actions."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch.utils import _pytree as pytree
from torchrl.data import Unbounded
from torchrl.envs import Compose, GymEnv, InitTracker, SerialEnv, StepCounter, TensorDictPrimer, TransformedEnv

from torchpod import checkpoint, random
from torchpod.agent import variables_of
from torchpod.algos.multi_agent import IPPO, IPPOConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.algos.sac import SAC, SACConfig
from torchpod.commands.export_run import _bounds, export_run
from torchpod.compose import load
from torchpod.env import TensorEnv
from torchpod.envs import CartPole, Catch, MemoryChain, Pendulum, TagGridWorld
from torchpod.interop import policy_module, to_tensordict
from torchpod.interop.env_base import to_torchrl
from torchpod.interop.policy import Greedy
from torchpod.main import main
from torchpod.rollout import make_step, start, unroll
from torchpod.run.execute import execute
from torchpod.specs import Array, Box, Discrete, EnvSpec
from torchpod.types import FIRST

SMALL = ["compile=false", "logger.console=false", "num_envs=8", "total_env_steps=256", "algo.unroll_length=16"]
SMALL += ["evaluation.episodes=2"]


def greedy(agent, env, variables, num_envs=5, length=30):
    """A trajectory of greedy actions."""
    keys = random.split(random.key(0), num_envs)
    carry = start(agent, env, keys)
    return unroll(make_step(agent, env, explore=False), variables, carry, keys, keys, length=length)[1]


def trained(folder, *overrides):
    run = execute(load([*SMALL, *overrides, f"run_dir={folder}"]))
    return run.agent, checkpoint.load_weights(checkpoint.latest(folder))


def made(agent):
    """Parameters that differ from those of the agent itself, and that decide something."""
    params, buffers = variables_of(agent)
    return {name: x + torch.randn_like(x) for name, x in params.items()} | buffers


class Masked(TensorEnv):
    """A dict with a mask that allows one action, another one in each row."""

    spec = EnvSpec("masked", {"x": Array((2,)), "action_mask": Array((3,), torch.bool)}, Discrete(3), 5)

    def reset(self, keys):
        return random.uniform(keys, 2, 0.0, 3.0)

    def transition(self, state, action, keys):
        return random.uniform(keys, 2, 0.0, 3.0), action * 1.0, action == 3

    def observe(self, state):
        return {"x": state, "action_mask": torch.arange(3, device=state.device) == state[:, :1].floor()}


@pytest.mark.parametrize(
    ("env", "kind", "config"),
    [
        (CartPole(), PPO, PPOConfig(hidden=(8,), normalize_observation=True, normalize_reward=True)),
        (Pendulum(), PPO, PPOConfig(hidden=(8,))),
        (Pendulum(), SAC, SACConfig(hidden=(8,))),
        (Catch(), PPO, PPOConfig(hidden=(8,))),
        (Masked(), PPO, PPOConfig(hidden=(8,))),
    ],
)
def test_a_module_takes_the_agents_greedy_actions(env, kind, config):
    agent = kind(env.spec, config)
    variables = made(agent)
    steps = to_tensordict(greedy(agent, env, variables))
    module = policy_module(agent, variables)
    flat = module(steps.select("observation").reshape(-1))
    assert module.in_keys == ["observation"] and not flat["action"].requires_grad
    assert torch.allclose(flat["action"].float(), steps["action"].reshape(flat["action"].shape).float(), atol=1e-5)


def test_a_module_with_a_memory_carries_it_and_forgets_where_an_episode_begins():
    env = MemoryChain(memory_length=4)
    agent = PPO(env.spec, PPOConfig(hidden=(8,), recurrent=8))
    variables = made(agent)
    trajectory, module = greedy(agent, env, variables), policy_module(agent, variables)
    steps = to_tensordict(trajectory)
    state = torch.zeros(5, 8)
    for t in range(30):
        row = steps[:, t].select("observation", "is_init").set("state", state)
        row = module(row)
        assert torch.equal(row["action"], steps["action"][:, t]), t
        state = row["next", "state"] + 0.0
    assert steps["is_init"].sum() > 5 and torch.allclose(state, trajectory.last_actor_state, atol=1e-6)


def test_wrong_variables_are_named():
    agent = PPO(CartPole().spec, PPOConfig(hidden=(8,)))
    variables = made(agent) | {"other": torch.zeros(1)}
    with pytest.raises(ValueError, match="not those of PPO: other is in one of them alone"):
        policy_module(agent, variables)
    members = {name: torch.stack([x, x]) for name, x in made(agent).items()}
    with pytest.raises(ValueError, match=r"those of PPO: .* has shape \[2, .*of a population give those of one member"):
        policy_module(agent, members)
    agent = PPO(CartPole().spec, PPOConfig(hidden=(8,), recurrent=4, normalize_reward=True))
    with pytest.raises(ValueError, match="the recurrent state of PPO is a tree"):
        policy_module(agent, made(agent))


class SeesReward(PPO):
    """Acts on the last reward."""

    def __init__(self, spec, config: PPOConfig):
        super().__init__(spec, config)

    def act(self, timestep, state, keys, explore=True):
        out, state = super().act(timestep, state, keys, explore)
        return (out if explore else out._replace(action=(timestep.reward > 0).long())), state


class Counts(SeesReward):
    """Acts on how often it has acted, whatever `recurrent` says."""

    def initial_state(self, batch_size):
        return {"count": torch.zeros(batch_size), "own": super().initial_state(batch_size)}

    def act(self, timestep, state, keys, explore=True):
        count = torch.where(timestep.step_type == FIRST, 0.0, state["count"] + 1)
        out, own = PPO.act(self, timestep, state["own"], keys, explore)
        return (out if explore else out._replace(action=(count % 2).long())), {"count": count, "own": own}


@pytest.mark.parametrize(("kind", "recurrent"), [(SeesReward, 0), (SeesReward, 8), (Counts, 0)])
def test_an_agent_that_acts_on_more_than_its_observation_is_refused(kind, recurrent):
    agent = kind(CartPole().spec, PPOConfig(hidden=(8,), recurrent=recurrent))
    row = {"observation": torch.zeros(3, 4)}
    if recurrent:
        row |= {"is_init": torch.zeros(3, 1, dtype=torch.bool), "state": torch.zeros(3, recurrent)}
    seen = "observation, state and first;" if recurrent else r"observation alone \(recurrent is False\);"
    told = f"action of {kind.__name__} depends on more, such as the last reward or a state, than .* given, {seen}"
    module = policy_module(agent, made(agent))
    for _ in range(2):
        with pytest.raises(ValueError, match=told):
            module(TensorDict(row, [3]))


def test_one_of_many_agents_that_acts_on_more_is_refused():
    class Team(IPPO):
        def act(self, timestep, state, keys, explore=True):
            out, state = super().act(timestep, state, keys, explore)
            return out._replace(action={g: (timestep.reward[g] > 0).long() for g in out.action}), state

    env = TagGridWorld()
    agent = Team(env.spec, IPPOConfig(hidden=(8,)))
    with pytest.raises(ValueError, match="the greedy action of Team depends on more, such as"):
        to_torchrl(env, 2).rollout(2, policy_module(agent, made(agent)))


def test_actions_are_one_hot_where_gymnasium_in_torchrl_takes_them_so():
    agent = PPO(CartPole().spec, PPOConfig(hidden=(8,)))
    weights = made(agent)
    rollout = GymEnv("CartPole-v1").rollout(8, policy_module(agent, weights, one_hot=2))
    assert torch.equal(rollout["action"].argmax(-1), agent_at(agent, weights, rollout["observation"]))
    assert rollout["action"].shape[1:] == (2,) and (rollout["action"].sum(-1) == 1).all()
    agent = PPO(Pendulum().spec, PPOConfig(hidden=(8,)))
    with pytest.raises(
        ValueError, match="one_hot=2 is the number of values of a discrete .* takes torch.float32 up to"
    ):
        policy_module(agent, made(agent), one_hot=2)(TensorDict({"observation": torch.zeros(2, 3)}, [2]))
    agent = IPPO(TagGridWorld().spec, IPPOConfig(hidden=(8,)))
    with pytest.raises(ValueError, match="one_hot=5 is for one agent, and IPPO has many; leave it out"):
        policy_module(agent, made(agent), one_hot=5)


def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


@pytest.mark.parametrize("make", [cartpole, lambda: SerialEnv(2, cartpole)])
def test_a_memory_is_carried_with_a_batch_axis_and_without(make):
    agent = PPO(CartPole().spec, PPOConfig(hidden=(8,), recurrent=8))
    weights = made(agent)
    primer = TensorDictPrimer({"state": Unbounded(torch.Size([8]))}, expand_specs=True)
    env = TransformedEnv(make(), Compose(StepCounter(8), InitTracker(), primer))
    rollout = env.rollout(30, policy_module(agent, weights), break_when_any_done=False)
    env.close()
    lead = rollout.batch_size[:-1]
    rows, policy, state = rollout.reshape(-1, 30), Greedy(agent, weights), agent.initial_state(lead.numel())
    for t in range(30):
        action, state = policy(rows["observation"][:, t], rows["is_init"][:, t, 0], state)
        assert torch.equal(rows["action"][:, t], action)
        torch.testing.assert_close(rows["next", "state"][:, t], state)
    assert rollout["action"].shape == (*lead, 30) and rows["is_init"].sum() > 3 * len(rows)


def test_a_policy_with_a_memory_plays_in_torchrl(seed):
    """Its state is carried on, and begins anew with an episode."""
    agent, rows = PPO(CartPole().spec, PPOConfig(hidden=(8,), recurrent=8)), 5
    weights = made(agent)
    module, env = policy_module(agent, weights), to_torchrl(CartPole(max_episode_steps=6), rows, seed=seed)
    with pytest.raises(
        ValueError, match=r"has a memory and reads 'is_init' and 'state' of shape \[8\] per row, and the"
    ):
        env.rollout(3, module)
    primer = TensorDictPrimer({"state": Unbounded(torch.Size([8]))}, expand_specs=True)
    rollout = TransformedEnv(env, Compose(InitTracker(), primer)).rollout(20, module, break_when_any_done=False)
    policy, state = Greedy(agent, weights), torch.randn(rows, 8)
    for t in range(20):
        action, state = policy(rollout["observation"][:, t], rollout["is_init"][:, t, 0], state)
        assert torch.equal(rollout["action"][:, t], action)
        torch.testing.assert_close(rollout["next", "state"][:, t], state, rtol=0, atol=0)
    assert rollout["is_init"].sum() >= 4 * rows and state.std() > 0


def test_observations_of_another_name_or_shape_are_refused():
    agent = PPO(CartPole().spec, PPOConfig(hidden=(8,)))
    module = policy_module(agent, made(agent))
    with pytest.raises(ValueError, match=r"the policy reads 'observation', and the TensorDict has \['pixels'\]; name"):
        module(TensorDict({"pixels": torch.zeros(3, 4)}, [3]))
    told = r"'observation' of shape \[7\] per row: its Linear\(in_features=4, .* takes 4 numbers and gets 7; give it"
    with pytest.raises(ValueError, match=told):
        module(TensorDict({"observation": torch.zeros(3, 7)}, [3]))


def test_dicts_of_observations_are_read_by_their_entries():
    agent = PPO(Masked().spec, PPOConfig(hidden=(8,)))
    module = policy_module(agent, made(agent))
    mask = torch.ones(3, 3, dtype=torch.bool)
    for observation, told in (
        ({"y": torch.zeros(3, 2), "action_mask": mask}, "it reads an entry 'x' of it; give it observations of the "),
        (
            {"x": {"z": torch.zeros(3, 2)}, "action_mask": mask},
            "its entry 'x' is a dict, and must be a tensor; give it",
        ),
        ({"x": torch.zeros(3, 5), "action_mask": mask}, r"its Linear\(.* takes 2 numbers and gets 5; give it"),
        ({"x": torch.zeros(3, 2), "action_mask": mask[:, :2]}, "per row: The size of tensor a .*; give it"),
    ):
        with pytest.raises(ValueError, match=told):
            module(TensorDict({"observation": observation}, [3]))
    agent = PPO(CartPole().spec, PPOConfig(hidden=(8,)))
    told = r"'observation' of shape {'x': \[4\]} per row: it takes one tensor, and no dict; give it observations of"
    with pytest.raises(ValueError, match=told):
        policy_module(agent, made(agent))(TensorDict({"observation": {"x": torch.zeros(3, 4)}}, [3]))


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_state_that_is_not_the_policys_is_refused_by_its_name(batch):
    agent = PPO(CartPole().spec, PPOConfig(hidden=(8,), recurrent=8))
    module = policy_module(agent, made(agent))
    no = torch.zeros(*batch, 1, dtype=torch.bool)

    def act(state, is_init=no):
        row = {"observation": torch.zeros(*batch, 4), "is_init": is_init, "state": state}
        return module(TensorDict(row, batch))["next", "state"]

    good = torch.zeros(*batch, 8)
    assert act(good).shape[-1] == 8
    told = f"the policy reads 'state' of shape [8] per row, and it has shape {[*batch, 5]}; let TensorDictPrimer bring"
    with pytest.raises(ValueError, match=re.escape(told)):
        act(good[..., :5])
    told = f"'is_init' as torch.bool of shape {[*batch, 1]}, for 'state' of {[*batch, 8]}, and it is torch.float32 of"
    with pytest.raises(ValueError, match=re.escape(told)):
        act(good, no.float())
    with pytest.raises(ValueError, match=f"it is torch.bool of shape {re.escape(str([*batch, 2]))}; let InitTracker"):
        act(good, torch.cat([no, no], -1))


def test_policies_of_many_agents_play_in_torchrl(seed):
    """Whose actions are those of the agent itself."""
    env = TagGridWorld(num_taggers=3, grid_length=4, start="uniform")
    agent = IPPO(env.spec, IPPOConfig(hidden=(8,)))
    groups = dict(env.spec.groups or {})
    weights = {name: 0 * x if name.endswith("bias") else 10 * x for name, x in made(agent).items()}
    module, theirs = policy_module(agent, weights), to_torchrl(env, 5, seed=seed)
    rollout = theirs.rollout(8, module, break_when_any_done=False)
    trajectory = rollout.reshape(-1)
    observation = {group: trajectory[group, "observation"] for group in groups}
    expected = Greedy(agent, weights, groups)(observation)
    assert {group: list(x.shape) for group, x in expected.items()} == {"tagger": [40, 3], "runner": [40, 1]}
    for group, x in expected.items():
        assert torch.equal(trajectory[group, "action"], x)
    assert len(torch.cat([x.flatten() for x in expected.values()]).unique()) > 1
    with pytest.raises(ValueError, match=r"the policy reads \('tagger', 'observation'\), and the TensorDict has"):
        module(TensorDict({"observation": torch.zeros(2, 17)}, [2]))


def test_a_memory_of_many_agents_has_no_key():
    agent = IPPO(TagGridWorld().spec, IPPOConfig(hidden=(8,), recurrent=8))
    with pytest.raises(ValueError, match="no key for the recurrent state of IPPO, which is of many agents; use `torch"):
        policy_module(agent, made(agent))


LOADED = """
import sys
sys.modules["torchpod"] = None  # an import of it fails
import torch
program = torch.export.load("policy.pt2").module()
for size in (1, 7):
    observation = torch.load("observation.pt")[:size]
    assert torch.equal(program(observation), torch.load("action.pt")[:size])
"""


def test_an_exported_program_runs_without_torchpod_and_takes_the_same_actions(tmp_path: Path):
    agent, weights = trained(tmp_path / "run", "env=cartpole")
    told = export_run(tmp_path / "run", out=tmp_path / "policy.pt2")
    assert told.startswith(f"wrote {tmp_path / 'policy.pt2'}: (observation float32 [B, 4]) -> action, of checkpoint ")
    torch.manual_seed(0)
    observation = torch.randn(7, 4)
    action = policy_module(agent, weights)(TensorDict({"observation": observation}, [7]))["action"]
    assert action.unique().tolist() == [0, 1]
    torch.save(observation, tmp_path / "observation.pt")
    torch.save(action, tmp_path / "action.pt")
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("env", ["catch", "pendulum"])
def test_images_and_continuous_actions_are_exported_into_the_run_folder(tmp_path: Path, env: str):
    agent, weights = trained(tmp_path / "run", f"env={env}")
    export_run(tmp_path / "run")
    program = torch.export.load(tmp_path / "run" / "policy.pt2").module()
    steps = to_tensordict(greedy(agent, {"catch": Catch, "pendulum": Pendulum}[env](), weights)).reshape(-1)
    assert torch.allclose(program(steps["observation"]).float(), steps["action"].float(), atol=1e-5)


def test_a_recurrent_policy_is_exported_with_its_state(tmp_path: Path):
    agent, weights = trained(tmp_path / "run", "env=memory_chain", "algo.agent.recurrent=8")
    assert "(observation float32 [B, 3], first bool [B], state float32 [B, 8]) -> (action, state)" in export_run(
        tmp_path / "run"
    )
    program = torch.export.load(tmp_path / "run" / "policy.pt2").module()
    steps, state = to_tensordict(greedy(agent, MemoryChain(), weights, length=60)), torch.zeros(5, 8)
    for t in range(60):
        action, state = program(steps["observation"][:, t], steps["is_init"][:, t, 0], state)
        assert torch.equal(action, steps["action"][:, t]), t


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own use of it
@pytest.mark.parametrize("settings", [("env=pendulum",), ("env=memory_chain", "algo.agent.recurrent=8")])
def test_an_exported_program_can_be_compiled_ahead_of_time(tmp_path: Path, settings: tuple[str, ...], seed: int):
    trained(tmp_path / "run", *settings)
    export_run(tmp_path / "run")
    program = torch.export.load(tmp_path / "run" / "policy.pt2")
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "compiled.pt2"))
    compiled = torch._inductor.aoti_load_package(path)
    torch.manual_seed(seed)
    for size in (1, 7):
        rows = torch.randn(size, 3)
        given = (rows,) if "env=pendulum" in settings else (rows, torch.rand(size) < 0.5, torch.randn(size, 8))
        for mine, theirs in zip(*map(pytree.tree_leaves, (compiled(*given), program.module()(*given))), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


REPLAY = ["algo.replay.capacity=1024", "algo.replay.min_size=64", "algo.replay.batch_size=16"]


def moved(folder, monkeypatch, rows, *overrides):
    """An agent, and parameters with which it decides otherwise for some rows than for others: its own, moved."""
    agent, own = trained(folder, *overrides)
    names = dict(agent.named_parameters())
    for _ in range(100):
        weights = own | {name: x + 0.3 * torch.randn_like(x) for name, x in own.items() if name in names}
        if rows is None or agent_at(agent, weights, rows).unique().numel() > 1:
            break
    monkeypatch.setattr(checkpoint, "load_weights", lambda _: dict(weights))
    return agent, weights


@pytest.mark.parametrize(
    ("algo", "env"),
    [
        *((["algo=" + name, *REPLAY], "cartpole") for name in ("dqn", "c51", "qr_dqn", "sac")),
        *((["algo=" + name, *REPLAY], "pendulum") for name in ("ddpg", "td3", "sac")),
        *((["algo=" + name], "cartpole") for name in ("a2c", "impala")),
        (["loss=ClipPPOLoss"], "cartpole"),
        (["loss=DQNLoss", *REPLAY], "cartpole"),
        (["loss=SACLoss", *REPLAY], "pendulum"),
    ],
    ids=lambda x: x if isinstance(x, str) else x[0],
)
def test_agents_are_exported_with_the_actions_that_they_take(tmp_path: Path, algo, env: str, monkeypatch, seed):
    torch.manual_seed(seed)
    make_env = {"cartpole": CartPole, "pendulum": Pendulum}[env]
    far = 3 * torch.randn(50, *make_env().spec.observation.shape)
    agent, weights = moved(tmp_path / "run", monkeypatch, far, *algo, f"env={env}")
    export_run(tmp_path / "run")
    program = torch.export.load(tmp_path / "run" / "policy.pt2").module()
    steps = greedy(agent, make_env(), weights)
    action = torch.cat([steps.output.action.flatten(0, 1), agent_at(agent, weights, far)])
    exported = program(torch.cat([steps.timestep.observation[:-1].flatten(0, 1), far]))
    assert exported.shape == action.shape and action.unique().numel() > 1
    torch.testing.assert_close(exported, action, rtol=1e-4, atol=1e-4)


def agent_at(agent, weights, rows):
    """Its greedy actions."""
    return policy_module(agent, weights)(TensorDict({"observation": rows}, [len(rows)]))["action"]


def test_r2d2_is_exported_with_its_state(tmp_path: Path, monkeypatch, seed):
    torch.manual_seed(seed)
    agent, weights = moved(
        tmp_path / "run",
        monkeypatch,
        None,
        "algo=r2d2",
        "env=memory_chain",
        "algo.unroll_length=8",
        "algo.replay.capacity=1024",
        "algo.replay.min_size=64",
    )
    export_run(tmp_path / "run")
    program = torch.export.load(tmp_path / "run" / "policy.pt2").module()
    steps, state = greedy(agent, MemoryChain(), weights, length=60), agent.initial_state(5)
    for t in range(60):
        first = steps.timestep.step_type[t] == FIRST
        action, state = program(steps.timestep.observation[t], first, state)
        assert torch.equal(action, steps.output.action[t]), t
    pytree.tree_map(lambda x, y: torch.testing.assert_close(x, y), state, steps.last_actor_state)
    assert (steps.timestep.step_type == FIRST).sum() > 5
    assert all(x.std() > 0 for x in pytree.tree_leaves(state))


def test_a_run_of_an_agent_that_acts_on_rewards_is_not_exported(tmp_path: Path):
    trained(tmp_path / "run", f"algo={__file__}:SeesReward", "env=cartpole")
    with pytest.raises(ValueError, match="of SeesReward depends on more, .*; use run.policy, which is given timesteps"):
        export_run(tmp_path / "run")
    assert not (tmp_path / "run" / "policy.pt2").exists()


def test_exported_actions_keep_the_bounds_that_the_command_tells(tmp_path: Path, monkeypatch, seed):
    torch.manual_seed(seed)
    agent, weights = moved(tmp_path / "run", monkeypatch, None, "env=pendulum")
    assert " -> action in [-2, 2], of checkpoint " in export_run(tmp_path / "run")
    program, far = torch.export.load(tmp_path / "run" / "policy.pt2").module(), 100 * torch.randn(50, 3)
    action = agent_at(agent, weights, far)
    assert action.abs().max() > 2
    torch.testing.assert_close(program(far), action.clamp(-2, 2), rtol=1e-4, atol=1e-4)
    assert _bounds({"scout": Discrete(2), "tank": Box((2,), 0.0)}) == " with tank in [0, inf]"
    assert _bounds(Box((2,))) == _bounds({"scout": Discrete(2)}) == ""


@pytest.mark.parametrize("algo", ["ippo", "mappo"])
def test_policies_of_many_agents_are_exported_by_group(tmp_path: Path, algo: str):
    agent, weights = trained(tmp_path / "run", f"algo={algo}", "env=tag_gridworld", "env.start=uniform")
    told = export_run(tmp_path / "run")
    assert "(observation {tagger: float32 [B, 4, 21], runner: float32 [B, 1, 21]}) -> action" in told
    program = torch.export.load(tmp_path / "run" / "policy.pt2").module()
    steps = greedy(agent, TagGridWorld(start="uniform"), weights)
    action = program({group: x[:-1].flatten(0, 1) for group, x in steps.timestep.observation.items()})
    assert action.keys() == steps.output.action.keys()
    for group, chosen in steps.output.action.items():
        assert (action[group] == chosen.flatten(0, 1)).double().mean() > 0.99  # but for rounding


SCHEDULED = """
from torchpod.algos.ppo import PPO, PPOConfig

class Scheduled(PPO):
    def __init__(self, spec, config: PPOConfig):
        super().__init__(spec, config)

    def act(self, timestep, state, keys, explore=True):
        out, state = super().act(timestep, state, keys, explore)
        late = (self.entropy_coefficient < 0.05).long()
        return out if explore else out._replace(action=out.action * 0 + late), state
"""


@pytest.mark.parametrize("population", [1, 2])
def test_hyperparameters_of_an_exported_policy_are_those_of_the_end(tmp_path: Path, population: int):
    (tmp_path / "agent.py").write_text(SCHEDULED)
    schedule = "algo.learner.schedules={entropy_coefficient:[[0,0.1],[100,0.0]]}"
    agent = f"algo={tmp_path}/agent.py:Scheduled", "+algo.agent.entropy_coefficient=0.1"
    trained(tmp_path / "run", "env=cartpole", *agent, schedule, f"population={population}")
    export_run(tmp_path / "run", member=None if population == 1 else 1)
    program = torch.export.load(tmp_path / "run" / "policy.pt2").module()
    assert program(torch.randn(3, 4)).tolist() == [1, 1, 1]


def test_members_of_a_population_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, weights = trained(tmp_path / "run", "env=cartpole", "population=2")

    def error(*arguments):
        assert main(["export", *arguments]) == 1
        return capsys.readouterr().err.removeprefix("torchpod: error: ").strip()

    assert error("run") == "run is a population; choose one with --member, from 0 to 1."
    assert error("run", "--member", "2") == "run is a population; choose one with --member, from 0 to 1."
    assert main(["export", "run", "--member", "1"]) == 0
    program = torch.export.load("run/policy.pt2")
    stored = program.state_dict.values()
    assert any(torch.equal(x, weights["policy.weight"][1]) for x in stored)
    assert error("nowhere").startswith("nowhere is no run folder")
    assert error("run", "--out", "x.onnx") == "--out x.onnx must end in .pt2, which is what torch.export.load reads."
    assert error("run/members/0", "--member", "1").startswith(
        "--member 1 is for a population, and run/members/0 is none"
    )
    (tmp_path / "file").touch()
    message = error("run", "--member", "0", "--out", "file/x.pt2")
    assert message.startswith("file/x.pt2 cannot be written (") and message.endswith("with --out FILE.pt2.")


def test_a_module_may_be_mapped_at_its_first_call(seed):
    torch.manual_seed(seed)
    agent = PPO(CartPole().spec, PPOConfig(hidden=(8,)))
    params, buffers = variables_of(agent)
    module, x = policy_module(agent, params | buffers), torch.randn(3, 5, 4)
    mapped = torch.vmap(lambda x: module(observation=x))(x)
    assert torch.equal(mapped, module(observation=x.flatten(0, 1)).unflatten(0, (3, 5)))
