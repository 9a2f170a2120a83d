"""Two kinds of agents in one environment: three with four actions and masks, one with two actions."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, bind, variables_of
from torchpod.anakin import Anakin, train
from torchpod.compile import Compiler
from torchpod.env import TensorEnv
from torchpod.learner import Learner, LearnerConfig
from torchpod.ops import distributions as dists
from torchpod.ops.returns import discounted_sum
from torchpod.specs import Array, Discrete, EnvSpec
from torchpod.types import LAST, ActorOutput, Batch, LossOutput

GROUPS = {"a": 3, "b": 1}
T, B = 8, 6


class Market(TensorEnv):
    """State `[B, 2]`. The agents of group a may never take action `count % 4`, nor the last one at state > 0.5."""

    def __init__(self):
        mask = Array((4,), torch.bool)
        self.spec = EnvSpec(
            "market",
            observation={"a": {"x": Array((2,)), "action_mask": mask}, "b": Array((1,))},
            action={"a": Discrete(4), "b": Discrete(2)},
            max_episode_steps=5,
            groups=GROUPS,
        )

    def reset(self, keys):
        words = random.bits(keys, 2)
        return {"x": random.to_uniform(words), "count": words[..., 0] % 4}

    def transition(self, state, action, keys):
        mask = self.observe(state)["a"]["action_mask"]
        forbidden = ~mask.gather(-1, action["a"][..., None])[..., 0]
        share = action["b"][..., None].float()[..., 0]  # [B, 1]
        reward = {"a": action["a"] * state["x"][:, :1] - 1000.0 * forbidden - share, "b": share - state["x"][:, 1:]}
        terminated = random.uniform(keys, 3)[:, 2] < 0.15
        return {"x": random.uniform(keys, 2), "count": state["count"] + 1}, reward, terminated

    def observe(self, state):
        x, count = state["x"], state["count"]
        allowed = torch.arange(4) != (count % 4)[:, None]
        allowed = allowed & ~((torch.arange(4) == 3) & (x[:, :1] > 0.5))
        agents = torch.arange(3.0)[None, :, None] / 3
        return {
            "a": {"x": x[:, None, :] + agents, "action_mask": allowed[:, None].expand(-1, 3, -1)},
            "b": x[:, :1, None],
        }


class Traders(Agent):
    """One policy per group, and one REINFORCE loss per group that also touches the other group's parameters."""

    def __init__(self):
        super().__init__()
        self.net_a, self.net_b = nn.Linear(2, 4), nn.Linear(1, 2)

    def optimizer_groups(self):
        return {"a": ("net_a.",), "b": ("net_b.",)}

    def logits(self, observation):
        a = self.net_a(observation["a"]["x"]).masked_fill(~observation["a"]["action_mask"], -float("inf"))
        return {"a": a, "b": self.net_b(observation["b"])}

    def act(self, timestep, state, keys, explore=True):
        logits = self.logits(timestep.observation)
        own = random.fold_in(keys[:, None], torch.arange(4))  # [B, 4, 3]: a key per agent
        if explore:
            action = {
                "a": random.categorical(own[:, :3], logits["a"]),
                "b": random.categorical(own[:, 3:], logits["b"]),
            }
        else:
            action = {g: x.argmax(-1) for g, x in logits.items()}
        log_prob = {g: dists.categorical_log_prob(logits[g], action[g]) for g in logits}
        return ActorOutput(action, {"action_log_prob": log_prob}), state

    def prepare(self, trajectory, keys):
        t = trajectory.timestep
        is_last = t.step_type[1:] == LAST
        returns = {}
        for group in GROUPS:
            keep = 0.9 * t.discount[group][1:] * (~is_last[..., None])
            returns[group] = discounted_sum(t.reward[group][1:], keep)
        steps = {
            "observation": pytree.tree_map(lambda x: x[:-1], t.observation),
            "action": trajectory.output.action,
            "return": returns,
            "weight": (t.step_type[:-1] != LAST).float(),
        }
        return Batch(steps)

    def loss(self, batch, keys, target):
        b, logits = batch.steps, self.logits(batch.steps["observation"])
        losses = {}
        for group in GROUPS:
            log_prob = dists.categorical_log_prob(logits[group], b["action"][group])
            losses[group] = -((log_prob * b["return"][group]).mean(-1) * b["weight"]).sum()
        decay = sum(p.square().sum() for p in self.parameters())  # pulls on the parameters of both groups
        weight = b["weight"].sum()
        losses = {"a": losses["a"] + 3 * decay * weight, "b": losses["b"] + 5 * decay * weight}
        return LossOutput(losses, {"decay": decay * weight})


def make(compiler=None, **config):
    config = {"num_epochs": 2, "num_minibatches": 2, "learning_rate": {"a": 1e-2, "b": 3e-2}} | config
    return Anakin(
        Traders,
        Market(),
        num_envs=B,
        unroll_length=T,
        learner=LearnerConfig(**config),
        num_iterations=4,
        compiler=compiler or Compiler(enabled=False),
    )


def allowed(trajectory):
    mask = trajectory.timestep.observation["a"]["action_mask"][:-1]
    return mask.gather(-1, trajectory.output.action["a"][..., None])


def test_axes_of_both_groups_are_kept_apart(seed):
    anakin = make()
    _, trajectory = anakin.rollout(anakin.init(seed))
    assert trajectory.output.action["a"].shape == (T, B, 3) and trajectory.output.action["b"].shape == (T, B, 1)
    assert trajectory.timestep.reward["a"].shape == (T + 1, B, 3)
    assert trajectory.timestep.observation["b"].shape == (T + 1, B, 1, 1)
    assert trajectory.timestep.step_type.shape == (T + 1, B)
    assert trajectory.output.action["b"].unique().tolist() == [0, 1]
    assert not (trajectory.output.action["a"] == trajectory.output.action["a"][..., :1]).all()  # keys differ


def test_masked_actions_are_never_taken(seed):
    anakin = make()
    state, masks = anakin.init(seed), []
    for _ in range(20):
        carry, trajectory = anakin.rollout(state)
        assert allowed(trajectory).all()
        assert (trajectory.timestep.reward["a"] > -900).all()
        masks.append(trajectory.timestep.observation["a"]["action_mask"])
        state = state._replace(carry=carry)
    assert all((~torch.cat(masks)).any((0, 1, 2)))  # each of the actions was forbidden some time


def test_two_iterations_train_both_groups_and_compiled_agrees_with_eager(seed):
    eager, compiled = make(), make(Compiler(enabled=True))
    start = eager.init(seed)
    first, metrics = eager.iterate(start)
    for name, value in start.learner.params.items():
        assert not torch.equal(first.learner.params[name], value)
    assert {"loss/a", "loss/b", "decay", "grad_norm/a", "grad_norm/b", "episodes"} <= set(metrics)
    reports, replays = zip(*train(compiled, start, until=2), strict=True)
    state = replays[-1].state
    assert len(reports) == 2 and all(x.isfinite().all() for x in state.learner.params.values())
    assert reports[0].metrics["loss/a"].item() == pytest.approx(metrics["loss/a"].item(), rel=1e-4, abs=1e-5)
    assert reports[-1].env_steps <= 2 * T * B
    _, trajectory = compiled.rollout(state)
    assert allowed(trajectory).all()
    again, _ = compiled.iterate(start)
    # Adam turns a gradient near 0 of either sign into a full step, so compare with the length of all steps
    for name, value in first.learner.params.items():
        torch.testing.assert_close(again.learner.params[name], value, rtol=0, atol=1e-3)
    assert torch.equal(again.carry.timestep.step_type, first.carry.timestep.step_type)


def test_each_group_follows_the_gradient_of_its_own_loss_alone(seed):
    torch.manual_seed(seed)
    anakin = make()
    state = anakin.init(seed)
    _, trajectory = anakin.rollout(state)
    config = LearnerConfig(
        num_epochs=1, num_minibatches=1, learning_rate={"a": 1e-2, "b": 3e-2}, max_grad_norm=1e9, beta1=0.9
    )
    learner = Learner(anakin.agent, config, num_iterations=1)
    after, metrics = learner.update(state.learner, trajectory, state.learner_keys)
    moments = learner.groups.by_parameter(after.mu)

    agent = Traders()
    agent.load_state_dict(state.learner.params)
    batch = agent.prepare(trajectory, state.learner_keys)
    steps = pytree.tree_map(lambda x: x.flatten(0, 1), batch.steps)
    steps["weight"] = steps["weight"] / steps["weight"].sum()
    losses = agent.loss(Batch(steps), state.learner_keys[0], None).loss
    for group, net in {"a": agent.net_a, "b": agent.net_b}.items():
        own = torch.autograd.grad(losses[group], list(net.parameters()), retain_graph=True)
        for name, gradient in zip((f"net_{group}.weight", f"net_{group}.bias"), own, strict=True):
            # after one step of Adam the first moment is (1 - beta1) times the gradient
            torch.testing.assert_close(moments[name] / 0.1, gradient, rtol=1e-4, atol=1e-5)
        norm = torch.stack([g.square().sum() for g in own]).sum().sqrt()
        torch.testing.assert_close(metrics[f"grad_norm/{group}"], norm, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(metrics[f"loss/{group}"], losses[group].detach(), rtol=1e-4, atol=1e-4)
        # the first step of Adam has the length of the group's own learning rate
        moved = (after.params[f"net_{group}.weight"] - state.learner.params[f"net_{group}.weight"]).abs().max()
        assert moved == pytest.approx({"a": 1e-2, "b": 3e-2}[group], rel=1e-2)


def test_each_group_is_clipped_by_its_own_norm(seed):
    anakin = make()
    state = anakin.init(seed)
    _, trajectory = anakin.rollout(state)
    rates = {"a": 1e-2, "b": 3e-2}
    config = LearnerConfig(num_epochs=1, num_minibatches=1, learning_rate=rates, max_grad_norm=0.01)
    after, _ = Learner(anakin.agent, config, num_iterations=1).update(state.learner, trajectory, state.learner_keys)
    for group in GROUPS:
        assert after.mu[group].norm().item() == pytest.approx(0.1 * 0.01, rel=1e-4)


def test_each_group_may_have_a_clip_of_its_own(seed):
    anakin = make()
    state = anakin.init(seed)
    _, trajectory = anakin.rollout(state)
    settings: dict = {"num_epochs": 1, "num_minibatches": 1, "learning_rate": {"a": 1e-2, "b": 3e-2}}
    norms = {"a": 0.01, "b": 0.003}
    learner = Learner(anakin.agent, LearnerConfig(max_grad_norm=norms, **settings), num_iterations=1)
    after, _ = learner.update(state.learner, trajectory, state.learner_keys)
    for group in GROUPS:
        assert after.mu[group].norm().item() == pytest.approx(0.1 * norms[group], rel=1e-4)
    with pytest.raises(
        ValueError, match=r"max_grad_norm has entries \['a'\], the agent has optimizer groups \['a', 'b'"
    ):
        Learner(anakin.agent, LearnerConfig(max_grad_norm={"a": 1.0}, **settings), num_iterations=1)


def test_losses_learning_rates_and_parameters_that_do_not_match_the_groups_are_refused(seed):
    anakin = make()
    state = anakin.init(seed)
    _, trajectory = anakin.rollout(state)

    class Misnamed(Traders):
        def loss(self, batch, keys, target):
            out = super().loss(batch, keys, target)
            return out._replace(loss=out.loss["a"])

    class Overlapping(Traders):
        def optimizer_groups(self):
            return {"a": ("net_",), "b": ("net_b.",)}

    config = LearnerConfig(learning_rate={"a": 1e-2, "b": 1e-2}, num_epochs=1, num_minibatches=1)
    with pytest.raises(ValueError, match="optimizer_groups"):
        Learner(Misnamed(), config, num_iterations=1).update(state.learner, trajectory, state.learner_keys)
    with pytest.raises(ValueError, match="net_b.weight"):
        Learner(Overlapping(), config, num_iterations=1)
    with pytest.raises(ValueError, match="learning_rate"):
        make(learning_rate={"a": 1e-2}).init(seed)


def test_bind_runs_one_module_with_the_parameters_of_another(seed):
    one, other = Traders(), Traders()
    env = Market()
    keys = random.split(random.key(seed), B)
    _, timestep = env.init(keys)
    before = {k: v.clone() for k, v in one.state_dict().items()}
    params, buffers = variables_of(other)
    bound, _ = bind(one, params | buffers).act(timestep, (), keys)
    own, _ = other.act(timestep, (), keys)
    assert all(torch.equal(bound.extras["action_log_prob"][g], own.extras["action_log_prob"][g]) for g in GROUPS)
    assert all(torch.equal(v, before[k]) for k, v in one.state_dict().items())
