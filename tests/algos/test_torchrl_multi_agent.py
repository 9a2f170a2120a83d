"""Losses of TorchRL for policies of many agents: the updates are TorchRL's own, of its networks for many agents."""

import dataclasses

import pytest
import torch
import torchrl
import torchrl.objectives
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.utils import _pytree as pytree
from torchrl.modules import MultiAgentMLP, ProbabilisticActor
from torchrl.objectives import ClipPPOLoss, ValueEstimators

from torchpod import random
from torchpod.agent import variables_of
from torchpod.algos.multi_agent import Policies
from torchpod.algos.torchrl import Choices, LossConfig, TorchRLConfig, parts, torchrl_agent
from torchpod.anakin import Anakin
from torchpod.compile import Compiler
from torchpod.env import TensorEnv
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.multi_agent.tag_continuous import TagContinuous
from torchpod.envs.multi_agent.tag_gridworld import TagGridWorld
from torchpod.interop.torchrl import LossAgent
from torchpod.learner import Learner, LearnerConfig
from torchpod.nets.nets import STATE
from torchpod.rollout import make_step, start, unroll
from torchpod.specs import Array, Discrete, EnvSpec, MultiDiscrete
from torchpod.types import LAST

T, B, N = 6, 5, 3
GAMMA, LAMBDA = 0.97, 0.9
LEARNER = LearnerConfig(
    num_epochs=1, num_minibatches=1, learning_rate=2**-7, anneal_learning_rate=False, max_grad_norm=0.3
)
LOSSES = ("ClipPPOLoss", "IPPOLoss", "MAPPOLoss", "PPOLoss")
if torchrl.__version__ >= "0.14":  # before, A2CLoss has no entropy of several choices at once
    LOSSES += ("A2CLoss",)


class Meadow(TensorEnv):
    """Three sheep, of which some are lost; a dog, who chooses twice at once; and a cat with a mask."""

    def __init__(self, max_episode_steps=99):
        self.spec = EnvSpec(
            "meadow",
            observation={
                "sheep": Array((3,)),
                "dog": Array((2,)),
                "cat": {"x": Array((2,)), "action_mask": Array((3,), torch.bool)},
            },
            action={"sheep": Discrete(4), "dog": MultiDiscrete((2, 3)), "cat": Discrete(3)},
            max_episode_steps=max_episode_steps,
            groups={"sheep": N, "dog": 1, "cat": 1},
        )

    def reset(self, keys):
        return {"x": random.uniform(keys, 11), "alive": torch.ones(*keys.shape[:-1], N, dtype=torch.bool)}

    def transition(self, state, action, keys):
        x = random.uniform(keys, 14)
        reward = {
            "sheep": state["x"][:, :N] * action["sheep"] * state["alive"],
            "dog": action["dog"].sum(-1) - state["x"][:, 4:5],
            "cat": action["cat"] * state["x"][:, 5:6],
        }
        return {"x": x[:, :11], "alive": state["alive"] & (x[:, 11:] > 0.2)}, reward, x[:, 0] < 0

    def observe(self, state):
        x = state["x"]
        mask = torch.stack([x[:, 9] > 0.5, x[:, 9] <= 0.5, x[:, 10] > 0.3], -1)
        return {
            "sheep": x[:, :9].unflatten(1, (N, 3)),
            "dog": x[:, None, 9:],
            "cat": {"x": x[:, None, 8:10], "action_mask": mask[:, None]},
        }

    def extras(self, state):
        others = torch.ones_like(state["alive"][:, :1])
        return {"alive": {"sheep": state["alive"], "dog": others, "cat": others}}


def make(name, seed, env=None, **config):
    torch.manual_seed(seed)
    settings = {"hidden": (6,), "normalize_advantage": False, "discount": GAMMA, "gae_lambda": LAMBDA} | config
    return torchrl_agent((env or Meadow()).spec, TorchRLConfig(name, **settings))


@torch.no_grad()
def rollout(agent, seed, env=None):
    env, keys = env or Meadow(), random.split(random.key(seed), B)
    params, buffers = variables_of(agent)
    step, carry = make_step(agent, env), start(agent, env, keys)
    return unroll(step, params | buffers, carry, keys, random.split(random.key(seed + 1), B), length=T)[1]


def doubled(trajectory):
    return pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, trajectory)


def learned(agent, trajectory, seed):
    learner = Learner(agent, LEARNER, num_iterations=1)
    return learner.update(learner.init(*variables_of(agent)), trajectory, random.split(random.key(seed), B))


def net_of_torchrl(size, outputs):
    """As in TorchRL's tutorials: one network for all agents, `[..., N, size]`."""
    return MultiAgentMLP(
        n_agent_inputs=size,
        n_agent_outputs=outputs,
        n_agents=N,
        centralized=False,
        share_params=True,
        depth=1,
        num_cells=6,
        activation_class=torch.nn.Tanh,
    )


def loss_of_torchrl(name):
    """Its keys are `("agents", ...)`; the critic of MAPPO reads what all agents observe beside what its own does."""
    actor = ProbabilisticActor(
        TensorDictModule(net_of_torchrl(3, 4), [("agents", "observation")], [("agents", "logits")]),
        in_keys=[("agents", "logits")],
        out_keys=[("agents", "action")],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
        log_prob_key=("agents", "action_log_prob"),
    )
    seen, size = ("joint", 3 + 3 * N + 4) if name == "MAPPOLoss" else ("observation", 3)
    critic = TensorDictModule(net_of_torchrl(size, 1), [("agents", seen)], [("agents", "state_value")])
    options = {} if name == "A2CLoss" else {"normalize_advantage": False}
    loss = getattr(torchrl.objectives, name)(actor, critic, reduction="none", **options)
    names = ("action", "reward", "done", "terminated", "advantage", "value_target")
    loss.set_keys(
        value=("agents", "state_value"),
        sample_log_prob=("agents", "action_log_prob"),
        **{x: ("agents", x) for x in names},
    )
    loss.make_value_estimator(
        ValueEstimators.MAGAE if "APPO" in name else ValueEstimators.GAE, gamma=GAMMA, lmbda=LAMBDA
    )
    return loss.double()


def in_torchrls_words(trajectory):
    """`[B, T, N, ...]` of the sheep: who is lost is done for."""
    t = trajectory.timestep
    own, dog, cat = t.observation["sheep"], t.observation["dog"], t.observation["cat"]["x"]
    everybody = torch.cat([x.flatten(2) for x in (own, dog, cat)], -1)[:, :, None].expand(-1, -1, N, -1)
    joint = torch.cat([own, everybody], -1)
    terminated = (t.discount["sheep"][1:] == 0)[..., None]
    agents = {
        "observation": own[:-1],
        "joint": joint[:-1],
        "action": trajectory.output.action["sheep"],
        "action_log_prob": trajectory.output.extras["sheep"]["action_log_prob"]
        if "action_log_prob" in trajectory.output.extras["sheep"]
        else torch.zeros_like(t.reward["sheep"][1:]),  # A2C does not read it
    }
    following = {
        "observation": own[1:],
        "joint": joint[1:],
        "reward": t.reward["sheep"][1:, ..., None],
        "done": terminated,
        "terminated": terminated,
    }
    rows = pytree.tree_map(lambda x: x.transpose(0, 1), {"agents": agents, "next": {"agents": following}})
    return TensorDict(rows, batch_size=[B, T])


@pytest.mark.filterwarnings("ignore:TensorDict.to_module:FutureWarning")  # of MultiAgentMLP in the oldest TorchRL
@pytest.mark.parametrize("name", LOSSES)
def test_an_update_is_that_of_torchrls_networks_for_many_agents(name, seed):
    """Its advantages, loss, and `torch.optim`, to 1e-9; who is lost is in no mean."""
    agent = make(name, seed)
    trajectory = doubled(rollout(agent, seed))
    agent.double()
    alive = trajectory.timestep.extras["alive"]["sheep"][:-1].transpose(0, 1).reshape(B * T, N)
    assert not alive.all() and (trajectory.timestep.step_type != LAST).all()
    state, metrics = learned(agent, trajectory, seed)

    loss = loss_of_torchrl(name)
    before = {k: x for k, x in variables_of(agent)[0].items() if k.startswith("policies.sheep.")}
    own = dict(loss.named_parameters())
    for x, value in zip(own.values(), before.values(), strict=True):
        x.data.copy_(value)
    data = in_torchrls_words(trajectory)
    with torch.no_grad():
        loss.value_estimator(data, params=loss.critic_network_params)
    out = loss(data.reshape(-1))
    terms = {k: x.reshape(B * T, N)[alive].mean() for k, x in out.items() if k.startswith("loss")}
    optimizer = torch.optim.Adam(own.values(), lr=2**-7, eps=1e-5)
    sum(terms.values()).backward()
    norm = torch.nn.utils.get_total_norm([x.grad for x in own.values()])
    for x in own.values():
        x.grad *= (0.3 / norm).clamp(max=1)
    optimizer.step()

    assert len(terms) == 3
    for key, x in terms.items():
        torch.testing.assert_close(metrics[f"sheep/{key}"], x.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(metrics["grad_norm/sheep"], norm, rtol=1e-9, atol=1e-9)
    for (key, x), value in zip(own.items(), before.items(), strict=True):
        torch.testing.assert_close(state.params[value[0]], x.detach(), rtol=1e-9, atol=1e-9, msg=key)
        assert (x != value[1]).any(), key


@pytest.mark.parametrize("policy", ["dog", "cat"])
@pytest.mark.parametrize("name", [*LOSSES, "KLPENPPOLoss"])
def test_every_policy_takes_the_step_of_its_own_loss(name, policy, seed):
    """With several choices at once, and with masks; what the loss itself changes is kept by policy."""
    agent = make(name, seed)
    trajectory = doubled(rollout(agent, seed))
    agent.double()
    state, metrics = learned(agent, trajectory, seed)
    spec = agent._spec_of(Meadow().spec, policy)
    seen = spec.observation if isinstance(spec.observation, dict) else {}
    assert (STATE in seen) == (name == "MAPPOLoss")
    loss = parts(spec, LossConfig(name, hidden=(6,))).loss.double()
    loss.reduction, loss.normalize_advantage = "none", False
    before = {k: x for k, x in variables_of(agent)[0].items() if k.startswith(f"policies.{policy}.")}
    own = dict(loss.named_parameters())
    assert len(own) == len(before)
    for key, x in own.items():
        x.data.copy_(before[f"policies.{policy}.{key.replace('_params.', '.')}"])
    with torch.no_grad():
        columns = agent.prepare(trajectory, random.split(random.key(seed), B)).steps
    names = [x for x in columns if x.startswith(f"{policy}/")]
    rows = {x.removeprefix(f"{policy}/"): pytree.tree_map(lambda v: v.flatten(0, 2), columns[x]) for x in names}
    for x in ("advantage", "value_target", "state_value"):
        rows[x] = rows[x][:, None]
    out = loss(TensorDict(rows, batch_size=[T * B]))
    terms = {k: x.mean() for k, x in out.items() if k.startswith("loss")}
    sum(terms.values()).backward()
    exact = 1e-6 if name == "KLPENPPOLoss" else 1e-9  # TorchRL changes beta between the forward and the backward pass
    for key, x in terms.items():
        torch.testing.assert_close(metrics[f"{policy}/{key}"], x.detach(), rtol=1e-9, atol=1e-9)
    norm = torch.nn.utils.get_total_norm([x.grad for x in own.values()])
    torch.testing.assert_close(metrics[f"grad_norm/{policy}"], norm, rtol=exact, atol=exact)
    assert all((state.params[key] != x).any() for key, x in before.items())
    if name == "KLPENPPOLoss":
        assert loss.beta == 0.5  # the policies are the same yet
        for other in ("cat", "dog", "sheep"):
            assert state.buffers[f"policies.{other}.beta"] == 0.5


def test_a_buffer_counts_by_the_rows_of_its_own_policy(seed):
    """Where all sheep are lost, the policies of a chunk are the same, which halves beta; the others count it."""
    agent = make("KLPENPPOLoss", seed)
    trajectory = rollout(agent, seed)
    for extras in trajectory.output.extras.values():  # as if other policies had acted in the first chunk
        before = extras["logits"][: T // 2]
        before += 5 * torch.randn(before.shape, generator=torch.Generator().manual_seed(seed))
    alive = trajectory.timestep.extras["alive"]["sheep"]
    alive[: T // 2], alive[T // 2 :] = True, False
    learner = Learner(agent, dataclasses.replace(LEARNER, chunk_rows=T * B * N // 2), num_iterations=1)
    before = learner.init(*variables_of(agent))
    state, metrics = learner.update(before, trajectory, random.split(random.key(seed), B))
    for name, beta in (("sheep", 2.0), ("dog", 1.25), ("cat", 1.25)):
        assert state.buffers[f"policies.{name}.beta"] == pytest.approx(beta), name
        assert metrics[f"buffer/policies.{name}.beta"] == pytest.approx(beta), name

    alive[:] = False
    state, _ = learner.update(before, trajectory, random.split(random.key(seed), B))
    assert state.buffers["policies.sheep.beta"] == 1 and state.buffers["policies.cat.beta"] != 1


def test_every_policy_reports_the_variance_that_its_values_explain(seed):
    agent = make("MAPPOLoss", seed)
    trajectory = rollout(agent, seed)
    batch = agent.prepare(trajectory, random.split(random.key(seed), B))
    _, metrics = learned(agent, trajectory, seed)
    alive = trajectory.timestep.extras["alive"]["sheep"][:-1]
    assert not alive.all()
    target, value = (batch.steps[f"sheep/{x}"][alive].double().detach() for x in ("value_target", "state_value"))
    expected = 1 - (target - value).var(correction=0) / target.var(correction=0)
    torch.testing.assert_close(metrics["sheep/explained_variance"], expected)
    assert {f"{name}/{x}" for name in ("dog", "cat") for x in ("reward_mean", "explained_variance")} <= metrics.keys()


def test_masks_and_choices_are_respected(seed):
    agent = make("ClipPPOLoss", seed)
    trajectory = rollout(agent, seed)
    mask, action = trajectory.timestep.observation["cat"]["action_mask"][:-1], trajectory.output.action
    assert not mask.all() and mask.gather(-1, action["cat"][..., None]).all()
    assert action["dog"].shape == (T, B, 1, 2) and (action["dog"] < torch.tensor([2, 3])).all()
    assert set(action["dog"][..., 1].flatten().tolist()) == {0, 1, 2}


def test_choices_are_drawn_as_often_as_they_should():
    logits = torch.tensor([[0.1, 0.6, 0.3], [0.25, 0.75, 0.0]]).log().clamp(min=torch.finfo(torch.float32).min)
    torch.manual_seed(0)
    x = Choices(logits).sample((20_000,))
    assert x.shape == (20_000, 2)
    found = torch.stack([(x == value).float().mean(0) for value in range(3)], -1)
    torch.testing.assert_close(found, torch.tensor([[0.1, 0.6, 0.3], [0.25, 0.75, 0.0]]), atol=0.015, rtol=0.0)
    torch.testing.assert_close(Choices(logits).log_prob(torch.tensor([1, 0])), torch.tensor(0.6 * 0.25).log())


@pytest.mark.parametrize("extreme", [0.0, 1 - 2.0**-24])
def test_choices_are_allowed_ones_whatever_is_drawn(extreme, monkeypatch):
    """At both ends of the interval, where the one that is allowed comes last, and where it comes first."""
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, extreme))
    low = torch.finfo(torch.float32).min
    logits = torch.tensor([[low, low, 0.7], [0.0, low, low]])
    assert Choices(logits).sample((5,)).tolist() == [[2, 0]] * 5


@pytest.mark.slow
def test_a_compiled_iteration_is_the_uncompiled_one(seed, recwarn):
    found = []
    for compiled in (False, True):
        program = Anakin(
            lambda: make("MAPPOLoss", seed),
            Meadow(max_episode_steps=5),
            num_envs=B,
            unroll_length=T,
            num_iterations=2,
            learner=LEARNER,
            compiler=Compiler(compiled),
        )
        state = program.init(seed)
        for _ in range(2):
            state, _ = program.iterate(state)
        found.append(state.learner.params)
    assert not [w for w in recwarn if "uncompiled" in str(w.message)]
    for name, x in found[0].items():
        torch.testing.assert_close(found[1][name], x, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules")  # which tensordict asks for
@pytest.mark.parametrize("name", LOSSES)
def test_a_hundred_iterations_compile_nothing_after_the_first(name, seed):
    compiler = Compiler(True, max_compilations=100)
    program = Anakin(
        lambda: make(name, seed),
        Meadow(max_episode_steps=5),
        num_envs=B,
        unroll_length=T,
        num_iterations=100,
        learner=LEARNER,
        compiler=compiler,
    )
    state, compiled = program.init(seed), []
    for _ in range(100):
        state, _ = program.iterate(state)
        compiled.append(sum(len(fn._programs) for fn in compiler._made))
    assert state.learner.num_steps == 100 and state.learner.healthy
    assert 0 < compiled[0] == compiled[-1] and not compiler.fell_back


@pytest.mark.parametrize(
    "env",
    [
        TagGridWorld(num_taggers=2, grid_length=4),
        TagContinuous(num_taggers=2, num_runners=2, use_full_observation=True),
    ],
)
def test_games_of_tag_are_trained(env, seed):
    program = Anakin(
        lambda: make("MAPPOLoss", seed, env),
        env,
        num_envs=4,
        unroll_length=8,
        num_iterations=2,
        learner=LearnerConfig(),
        compiler=Compiler(False),
    )
    first = program.init(seed)
    state, metrics = program.iterate(first)
    assert {"tagger/loss_objective", "runner/loss_critic", "grad_norm/runner"} <= metrics.keys()
    for name, x in state.learner.params.items():
        assert x.isfinite().all() and (x != first.learner.params[name]).any(), name


class ManyClipPPO(Policies):
    """A user's own: a loss with networks of one's own per policy."""

    def __init__(self, spec, config, make):
        super().__init__(spec, config, make, LossConfig)


def grouped(spec, config):
    actor, loss = parts(spec, config)
    return LossAgent(actor, loss, spec=spec, groups={"actor": ("actor_network.",), "critic": ("critic_network.",)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make("DQNLoss", 0), "DQNLoss learns from replay, which policies of many agents cannot"),
        (
            lambda: make("MAPPOLoss", 0, CartPole()),
            "MAPPOLoss is for environments with groups of agents, and cartpole has one",
        ),
        (
            lambda: make("IPPOLoss", 0, CartPole(), policies={"a": [0]}),
            "are for groups of agents, and cartpole has one agent",
        ),
        (
            lambda: LossAgent(*parts(CartPole().spec, LossConfig()), spec=Meadow().spec),
            "LossAgent trains one agent, and meadow has the groups",
        ),
        (
            lambda: ManyClipPPO(Meadow().spec, TorchRLConfig(), grouped),
            r"policy sheep has the optimizer groups \['actor', 'critic'\]; a policy is one",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("loss", ["REDQLoss", "DiscreteSACLoss"])
def test_losses_with_replay_are_sent_to_one_that_works(loss):
    with pytest.raises(ValueError, match=f"{loss} learns from replay, .*tagger of tag_gridworld.*; use loss=ClipPPO"):
        torchrl_agent(TagGridWorld().spec, TorchRLConfig(loss, hidden=(8,)))


def test_policies_may_have_losses_and_settings_of_their_own(seed):
    policies = {"sheep": {"loss": "MAPPOLoss", "hidden": [3]}, "cat": {}, "dog": {"train": False}}
    agent = make("ClipPPOLoss", seed, policies=policies, normalize_advantage=True)
    losses = {name: agent.policies[name]._pure.loss for name in policies}
    assert type(losses["sheep"]).__name__ == "MAPPOLoss" and type(losses["dog"]) is ClipPPOLoss
    assert agent.standardise == ("sheep/advantage", "cat/advantage")
    assert list(agent.optimizer_groups()) == ["sheep", "cat"]
    sizes = {name: x.shape[1] for name, x in variables_of(agent)[0].items() if name.endswith("body.0.weight")}
    assert sorted(sizes.values()) == [2, 2, 3, 3 + 3 * N + 4]
    state, _ = learned(agent, rollout(agent, seed), seed)
    before = variables_of(agent)[1]
    assert all(torch.equal(state.buffers[k], x) for k, x in before.items() if k.startswith("policies.dog."))
