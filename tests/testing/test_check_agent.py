"""check_agent passes what keeps the contract, and names the rule that each broken agent breaks."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchpod import random
from torchpod.agent import Agent
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.env import HostEnv, TensorEnv
from torchpod.envs import Catch
from torchpod.nets import RunningMoments
from torchpod.specs import Array, EnvSpec, MultiDiscrete
from torchpod.testing import ContractError, check_agent
from torchpod.types import FIRST, LAST, ActorOutput, Batch, LossOutput

SPEC = Catch(rows=4, columns=3).spec


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


class Small(Agent):
    """Actor and critic with a loss each, from one-step rewards."""

    target_rate = 0.01

    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(12, 3), nn.Linear(12, 1)

    def features(self, observation):
        return observation.flatten(-3)

    def act(self, timestep, state, keys, explore=True):
        logits = self.actor(self.features(timestep.observation))
        action = random.categorical(keys, logits) if explore else logits.argmax(-1)
        return ActorOutput(action, {"state_value": self.critic(self.features(timestep.observation))[..., 0]}), state

    def prepare(self, trajectory, keys):
        t = trajectory.timestep
        steps = {
            "observation": t.observation[:-1],
            "action": trajectory.output.action,
            "reward": t.reward[1:],
            "weight": (t.step_type[:-1] != LAST).float(),
        }
        return Batch(steps)

    def loss(self, batch, keys, target):
        b = batch.steps
        x, w = self.features(b["observation"]), b["weight"]
        log_prob = self.actor(x).log_softmax(-1).gather(-1, b["action"][..., None])[..., 0]
        assert target is not None
        advantage = b["reward"] - target("value_of", x)
        actor = -(log_prob * advantage * w).sum()
        critic = ((self.value_of(x) - b["reward"]).square() * w).sum()
        return LossOutput({"actor": actor, "critic": critic}, {"log_prob": (log_prob * w).sum()})

    def value_of(self, x):
        return self.critic(x)[..., 0]

    def optimizer_groups(self):
        return {"actor": ("actor.",), "critic": ("critic.",)}


class Column(Small):
    """A critic whose `[R, 1]` meets rewards `[R]`."""

    def __init__(self, by_mean=False):
        super().__init__()
        self.by_mean = by_mean

    def loss(self, batch, keys, target):
        out, b = super().loss(batch, keys, target), batch.steps
        critic = (self.critic(self.features(b["observation"])) - b["reward"]).square()
        assert isinstance(out.loss, dict)
        critic = critic.mean() if self.by_mean else (critic * b["weight"]).sum()
        return out._replace(loss=out.loss | {"critic": critic})


class Recurrent(Small):
    """Remembers a leaky sum of what it saw; its loss sees whole sequences."""

    recurrent = True

    def __init__(self):
        super().__init__()
        self.actor = nn.Linear(24, 3)

    def initial_state(self, batch_size):
        return {"memory": torch.zeros(batch_size, 12)}

    def act(self, timestep, state, keys, explore=True):
        x = self.features(timestep.observation)
        memory = torch.where((timestep.step_type == FIRST)[:, None], 0.0, state["memory"])
        logits = self.actor(torch.cat([x, memory], -1))
        action = random.categorical(keys, logits) if explore else logits.argmax(-1)
        return ActorOutput(action, {}), {"memory": 0.5 * memory + x}

    def prepare(self, trajectory, keys):
        batch = super().prepare(trajectory, keys)
        first = trajectory.timestep.step_type[:-1] == FIRST
        return Batch({**batch.steps, "first": first}, trajectory.actor_state)

    def loss(self, batch, keys, target):
        b, memory, log_prob = batch.steps, batch.actor_state["memory"], []
        w = b["weight"]
        for t in range(w.shape[0]):
            x = self.features(b["observation"][t])
            memory = torch.where(b["first"][t][:, None], 0.0, memory)
            logits = self.actor(torch.cat([x, memory], -1))
            log_prob.append(logits.log_softmax(-1).gather(-1, b["action"][t][..., None])[..., 0])
            memory = 0.5 * memory + x
        actor = -(torch.stack(log_prob) * b["reward"] * w).sum()
        critic = ((self.value_of(self.features(b["observation"])) - b["reward"]).square() * w).sum()
        return LossOutput({"actor": actor, "critic": critic}, {})


class Noisy(Small):
    """A loss that needs its key: noise per row of the minibatch."""

    def loss(self, batch, keys, target):
        noise = random.normal(keys, 2 * ((batch.steps["weight"].shape[0] + 1) // 2))
        reward = batch.steps["reward"] + noise[: batch.steps["weight"].shape[0]]
        return super().loss(batch._replace(steps={**batch.steps, "reward": reward}), keys, target)


class Reports(Small):
    """Running moments, a buffer that the loss moves, frozen layers, and what it tells of rewards."""

    def __init__(self):
        super().__init__()
        self.moments, self.fixed = RunningMoments((4, 3, 1)), nn.Linear(12, 12).requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))

    def features(self, observation):
        return self.fixed(super().features(observation))

    def statistics(self, trajectory) -> dict[str, Any]:
        t = trajectory.timestep
        return {"moments": (t.observation[1:], (t.step_type[1:] != FIRST).float())}

    def prepare(self, trajectory, keys):
        reward = trajectory.timestep.reward[1:]
        return super().prepare(trajectory, keys)._replace(report={"reward": reward, "value": 0 * reward})

    def loss(self, batch, keys, target):
        return super().loss(batch, keys, target)._replace(buffers={"count": self.count + 1})


class Late(Small):
    """Learns from the last step of each window alone, and says how urgent that is."""

    replayed = 3

    def prepare(self, trajectory, keys):
        return Batch({name: x[2:] for name, x in super().prepare(trajectory, keys).steps.items()})

    def loss(self, batch, keys, target):
        return super().loss(batch, keys, target)._replace(priority=batch.steps["weight"])


class Unmasked(Late):
    """Learns from all rows of windows, resets too."""

    def prepare(self, trajectory, keys):
        steps = Small.prepare(self, trajectory, keys).steps
        return Batch({name: torch.ones_like(x[:1]) if name == "weight" else x[:1] for name, x in steps.items()})


class Adapts(Small):
    """Changes a hyperparameter of its own."""

    def __init__(self, in_place):
        super().__init__()
        self.hyperparameter("beta", 1.0)
        self.in_place = in_place

    def loss(self, batch, keys, target):
        out = super().loss(batch, keys, target)
        if self.in_place:
            self.beta.mul_(2.0)
        else:
            self.beta = self.beta * 2.0
        return out


class Urges(Late):
    """As `Late`, but that its priorities are those of steps."""

    prepare = Small.prepare


@pytest.mark.parametrize("kind", [Small, Recurrent, Noisy, Reports, Late])
def test_agents_that_keep_the_contract_pass(kind):
    check_agent(kind(), Catch(rows=4, columns=3))


@pytest.mark.gpu
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("kind", [Small, Recurrent, Reports])
def test_agents_that_keep_the_contract_pass_on_a_gpu(kind, quick):
    check_agent(kind(), Catch(rows=4, columns=3), device="cuda", quick=quick)


def test_an_agent_may_act_in_a_host_environment():
    check_agent(Small(), HostEnv(Catch(rows=4, columns=3)), compile=False)


def act_with(change):
    class Changed(Small):
        def act(self, timestep, state, keys, explore=True):
            output, state = super().act(timestep, state, keys, explore)
            return change(self, output, state, timestep, keys)

    return Changed


def prepare_with(change):
    class Changed(Small):
        def prepare(self, trajectory, keys):
            batch = super().prepare(trajectory, keys)
            return batch._replace(steps=change(dict(batch.steps)))

    return Changed


def loss_with(change):
    class Changed(Small):
        def loss(self, batch, keys, target):
            return change(self, super().loss(batch, keys, target), batch)

    return Changed


class WrongState(Small):
    def initial_state(self, batch_size):
        return torch.zeros(12)


class StateChangesType(Small):
    def initial_state(self, batch_size):
        return torch.zeros(batch_size, 2)

    def act(self, timestep, state, keys, explore=True):
        output, state = super().act(timestep, state, keys, explore)
        return output, state.double()


class AlwaysExplores(Small):
    def act(self, timestep, state, keys, explore=True):
        return super().act(timestep, state, keys, True)


class Global(Small):
    def act(self, timestep, state, keys, explore=True):
        output, state = super().act(timestep, state, keys, explore)
        return output._replace(extras={"noise": torch.rand(keys.shape[0])}), state


class CountsCalls(Small):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def act(self, timestep, state, keys, explore=True):
        self.calls += 1
        output, state = super().act(timestep, state, keys, explore)
        return output._replace(extras={"calls": torch.full((keys.shape[0],), self.calls)}), state


class CountsInSilence(Small):
    calls = 0

    def act(self, timestep, state, keys, explore=True):
        self.calls += 1
        return super().act(timestep, state, keys, explore)


class FromTheFuture(Small):
    max_lag = -1


class UnusedParameter(Small):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(1, 1)

    def optimizer_groups(self):
        return {"actor": ("actor.", "spare."), "critic": ("critic.",)}


class ForgottenGroup(Small):
    def optimizer_groups(self):
        return {"actor": ("actor.",), "critic": ("critik.",)}


class WrongNames(Small):
    def optimizer_groups(self):
        return {"policy": ("actor.",), "critic": ("critic.",)}


class EmptyGroup(Small):
    def optimizer_groups(self):
        return {**super().optimizer_groups(), "alpha": ("log_alpha",)}


class UnknownInterval(Small):
    optimizer_intervals = {"policy": 2}


class NeverMoves(Small):
    target_interval = 0


class GreedyOutOfRange(Small):
    def act(self, timestep, state, keys, explore=True):
        output, state = super().act(timestep, state, keys, explore)
        return output if explore else output._replace(action=output.action + 3), state


class Remembers(Recurrent):
    """The end of one episode in the next."""

    def act(self, timestep, state, keys, explore=True):
        return super().act(timestep._replace(step_type=timestep.step_type.clamp(min=1)), state, keys, explore)


def seen_as(name, choose):
    class Changed(Reports):
        def statistics(self, trajectory):
            return {name: choose(trajectory.timestep)}

    return Changed


def report_with(change, through=False):
    class Changed(Reports):
        through_env = through

        def prepare(self, trajectory, keys):
            batch = super().prepare(trajectory, keys)
            return batch._replace(report=change(batch.report))

    return Changed


class Normalises(Small):
    def loss(self, batch, keys, target):
        reward = batch.steps["reward"]
        reward = (reward - reward.mean()) / (reward.std() + 1e-8)
        return super().loss(batch._replace(steps={**batch.steps, "reward": reward}), keys, target)


class DividesByRows(Small):
    def loss(self, batch, keys, target):
        weight = batch.steps["weight"] / batch.steps["weight"].numel()
        return super().loss(batch._replace(steps={**batch.steps, "weight": weight}), keys, target)


class ForgetsWeight(Small):
    def loss(self, batch, keys, target):
        weight = torch.full_like(batch.steps["weight"], 1 / batch.steps["weight"].numel())
        return super().loss(batch._replace(steps={**batch.steps, "weight": weight}), keys, target)


class AveragesOverWeights(Small):
    def loss(self, batch, keys, target):
        weight = batch.steps["weight"] / batch.steps["weight"].sum()
        return super().loss(batch._replace(steps={**batch.steps, "weight": weight}), keys, target)


class Branches(Small):
    def act(self, timestep, state, keys, explore=True):
        if timestep.observation.sum() < 0:
            explore = False
        return super().act(timestep, state, keys, explore)


def unweighted_metric(agent, out, batch):
    return out._replace(metrics={"log_prob": out.metrics["log_prob"] + 1})


def coupled_gradient(agent, out, batch):
    """Zero in value and linear in the weights, but its gradient sees every row."""
    every = agent.actor(agent.features(batch.steps["observation"])).square().sum()
    return out._replace(loss={**out.loss, "actor": out.loss["actor"] + every - every.detach()})


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (WrongState, "initial_state(B) must be a tensor with the B axis first"),
        (act_with(lambda a, o, s, t, k: o), "act() must return (ActorOutput, state)."),
        (
            act_with(lambda a, o, s, t, k: (o._replace(action=o.action.float()), s)),
            "action must be a torch.int64 tensor of shape [8]",
        ),
        (act_with(lambda a, o, s, t, k: (o._replace(action=o.action + 3), s)), "action must be in {0, ..., 2}"),
        (
            act_with(lambda a, o, s, t, k: (o._replace(extras={"value": o.extras["state_value"].sum()}), s)),
            "ActorOutput.extras['value'] must be a tensor with the B axis first",
        ),
        (StateChangesType, "act() must return a state with the structure, shapes and dtypes of initial_state()."),
        (
            act_with(lambda a, o, s, t, k: (t.reward.add_(1), (o, s))[1]),
            "act() must not modify its arguments; it changed (timestep, state, keys)[0].reward.",
        ),
        (Global, "act() must be a function of its arguments; two equal calls differ in result[0].extras['noise']."),
        (CountsCalls, "act() must be a function of its arguments; two equal calls differ in"),
        (CountsInSilence, "act() must keep nothing on self, but in its state; it wrote self.calls."),
        (FromTheFuture, "max_lag must be a number of iterations, at least 0, or None for no limit; it is -1."),
        (AlwaysExplores, "act(explore=False) must not be random: two keys gave two actions."),
        (
            act_with(
                lambda a, o, s, t, k: (
                    o._replace(extras={"v": o.extras["state_value"] - o.extras["state_value"].mean()}),
                    s,
                )
            ),
            "act(): rows must be independent; leaving out environments changed",
        ),
        (prepare_with(lambda s: {"x": s["weight"]}), "Batch.steps must be a dict that holds `weight`"),
        (prepare_with(lambda s: s | {"weight": s["weight"][0]}), "Batch.steps['weight'] must be a torch.float32"),
        (prepare_with(lambda s: s | {"x": s["action"][0]}), "Batch.steps['x'] must be a tensor [T, B, ...]"),
        (prepare_with(lambda s: s | {"weight": s["weight"] - 1}), "Batch.steps['weight'] must be at least 0"),
        (prepare_with(lambda s: s | {"weight": s["weight"] * 0 + 1}), "Batch.steps['weight'] must be 0 at LAST"),
        (
            prepare_with(lambda s: s | {"x": torch.rand(s["weight"].shape)}),
            "prepare() must be a function of its arguments; two equal calls differ in result.steps['x'].",
        ),
        (EmptyGroup, "optimizer_groups() has 'alpha', to which no parameter belongs; leave it out."),
        (
            UnknownInterval,
            "optimizer_intervals must name some of optimizer_groups(), ['actor', 'critic'], not ['policy'].",
        ),
        (NeverMoves, "target_interval must be at least 1; it is 0."),
        (GreedyOutOfRange, "act(explore=False): action must be in {0, ..., 2}"),
        (
            Remembers,
            "act() of a recurrent agent must begin anew where step_type is FIRST; another state before it changed the",
        ),
        (seen_as("count", lambda t: t.reward), "statistics() must name modules that are RunningMoments, not 'count'."),
        (seen_as("moments", lambda t: t.reward), "statistics()['moments'] must have the shape [4, 3, 1] of its module"),
        (
            seen_as("moments", lambda t: (t.observation, t.reward[1:])),
            "statistics()['moments'] must have the shape [4, 3, 1] of its module",
        ),
        (report_with(lambda r: {"value": r["value"]}), "Batch.report must have 'reward' beside 'value'."),
        (
            report_with(lambda r: {"reward": r["reward"][:, :1]}),
            "Batch.report['reward'] must have the shape of 'weight'",
        ),
        (report_with(lambda r: r, through=True), "Batch.report is for agents that learn from each trajectory as it"),
        (
            loss_with(lambda a, o, b: o._replace(buffers={"total": b.steps["weight"].sum()})),
            "LossOutput.buffers['total'] must be a scalar, the new value of a buffer of the agent of that name.",
        ),
        (
            loss_with(lambda a, o, b: o._replace(priority=-b.steps["weight"] - 1)),
            "LossOutput.priority must be at least 0, and finite.",
        ),
        (ForgottenGroup, "optimizer_groups() must put every parameter in exactly one group; critic.weight is in []."),
        (WrongNames, "loss() must return one loss per name of optimizer_groups(), ['critic', 'policy']"),
        (loss_with(lambda a, o, b: o.loss["actor"]), "loss() must return a LossOutput; it returned a Tensor."),
        (
            loss_with(lambda a, o, b: o._replace(loss={**o.loss, "actor": o.loss["actor"] / 0})),
            "loss 'actor' must be finite",
        ),
        (
            loss_with(lambda a, o, b: o._replace(loss={**o.loss, "actor": b.steps["weight"]})),
            "loss 'actor' must be a torch.float32 tensor of shape []",
        ),
        (loss_with(lambda a, o, b: o._replace(metrics={"x": 1.0})), "metric 'x' must be a scalar tensor."),
        (
            loss_with(lambda a, o, b: o._replace(metrics={"env_steps": b.steps["weight"].sum()})),
            "metric 'env_steps' is a number of the run's own; give it another name.",
        ),
        (
            loss_with(lambda a, o, b: o._replace(priority=b.steps["weight"][:3])),
            "LossOutput.priority must have one entry per row, 256 here; it has the shape [3].",
        ),
        (Unmasked, "Batch.steps['weight'] must be 0 at LAST"),
        (
            lambda: Adapts(False),
            "loss() must not change self.beta: that is lost after the call. loss() returns the new va",
        ),
        (
            lambda: Adapts(True),
            "loss() must not change self.beta: that is lost after the call. loss() returns the new va",
        ),
        (
            loss_with(lambda a, o, b: o._replace(loss={name: x.detach() for name, x in o.loss.items()})),
            "loss() depends on no parameter: something in it is detached.",
        ),
        (Urges, "LossOutput.priority must have one entry per window of replay, 240 here; it has the shape [720]."),
        (
            loss_with(lambda a, o, b: o._replace(loss={**o.loss, "actor": o.loss["actor"] + torch.rand(())})),
            "loss() must be a function of its arguments; two equal calls differ in",
        ),
        (ForgetsWeight, "loss() must be a sum over rows weighted by steps['weight']"),
        (AveragesOverWeights, "loss() must be a sum over rows weighted by steps['weight']"),
        (loss_with(unweighted_metric), "and so must its metrics; result[1]['log_prob'] is not"),
        (loss_with(coupled_gradient), "Rows of weight 0 must contribute no gradient; they change"),
        (Column, "Rows of weight 0 must contribute no gradient; they change gradient['critic.weight']: [256, 1] be"),
        (Column, '`critic = (self.critic(self.features(b["observation"])) - b["reward"]).square()`); each row meets'),
        (lambda: Column(by_mean=True), "result[0]['critic'] is not: [256, 1] beside [256] makes [256, 256] (test_ch"),
        (Normalises, "what looks at the whole minibatch, such as advantage normalisation, is the learner's"),
        (DividesByRows, "Doubling the rows with half the weights must give the same loss; result[0]['actor'] differs."),
        (
            UnusedParameter,
            "Every parameter must get a gradient from the loss of its group; ['spare.weight', 'spare.bias'] get none.",
        ),
        (Branches, "act() must work mapped over a population with torch.vmap; it raised"),
    ],
)
def test_a_broken_agent_is_named(make, rule):
    with pytest.raises(ContractError, match=re.escape(rule)):
        check_agent(make(), Catch(rows=4, columns=3), compile=False)


def test_an_agent_that_cannot_be_traced_is_named():
    class Prints(Small):
        def act(self, timestep, state, keys, explore=True):
            torch._dynamo.graph_break()
            return super().act(timestep, state, keys, explore)

    told = r"act\(\) must work compiled in one graph; it raised .* line \d+: `torch._dynamo.graph_break\(\)`\)\.$"
    with pytest.raises(ContractError, match=told):
        check_agent(Prints(), Catch(rows=4, columns=3))


class Layered(Small):
    """With a module between observation and heads."""

    layer: nn.Module

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)

    def features(self, observation):
        x = observation.flatten(-3)
        is_sequence = isinstance(self.layer, nn.RNNBase)
        y = self.layer(x.reshape(1, -1, 12) if is_sequence else x.reshape(-1, 12))
        return (y[0] if isinstance(y, tuple) else y).reshape(x.shape)


@pytest.mark.parametrize(
    ("layer", "rule"),
    [
        (
            nn.BatchNorm1d(12),
            "layer is a BatchNorm1d with running statistics, which it writes into its buffers; use nn.L",
        ),
        (
            nn.Sequential(nn.Dropout(0.25)),
            "layer.0 is a Dropout with p=0.25, which draws from torch's generator; leave",
        ),
        (
            nn.GRU(12, 12),
            "layer is a GRU, which neither torch.vmap, and so no population, nor torch.compile knows; use ",
        ),
        (nn.LSTM(12, 12), "layer is a LSTM, which neither"),
    ],
)
def test_modules_that_are_no_pure_functions_are_named(layer, rule):
    with pytest.raises(ContractError, match=re.escape(rule)):
        check_agent(Layered(layer), Catch(rows=4, columns=3), compile=False)


OwnGRU = type("OwnGRU", (nn.GRU,), {"forward": lambda self, x: x @ self.weight_ih_l0[:12].T})
"""Of operations that can be mapped, as TorchRL's."""


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(12).eval(), nn.Dropout(0.0), nn.Dropout().eval(), OwnGRU(12, 12)])
def test_modules_that_do_no_harm_pass(layer):
    check_agent(Layered(layer), Catch(rows=4, columns=3), compile=False)


class OneHot(Small):
    def loss(self, batch, keys, target):
        chosen = F.one_hot(batch.steps["action"], 3).float()
        out = super().loss(batch, keys, target)
        return out._replace(metrics={"chosen": (chosen[:, 0] * batch.steps["weight"]).sum()})


class Indexes(Small):
    def loss(self, batch, keys, target):
        rows = batch.steps["weight"][batch.steps["reward"] > 0]
        return super().loss(batch, keys, target)._replace(metrics={"rows": rows.sum()})


@pytest.mark.parametrize(
    ("kind", "line", "repair"),
    [
        (OneHot, 'chosen = F.one_hot(batch.steps["action"], 3).float()', "use torchpod.ops.features.one_hot"),
        (
            Indexes,
            'rows = batch.steps["weight"][batch.steps["reward"] > 0]',
            "keep all rows: choose by torch.where, or",
        ),
        (Branches, "if timestep.observation.sum() < 0:", "keep numbers tensors, and choose by torch.where."),
    ],
)
def test_the_line_that_cannot_be_mapped_is_named_and_what_to_write_instead(kind, line, repair):
    pattern = rf"it raised RuntimeError: .* \(test_check_agent.py, line \d+: `{re.escape(line)}`\); {re.escape(repair)}"
    with pytest.raises(ContractError, match=pattern):
        check_agent(kind(), Catch(rows=4, columns=3), compile=False)


class ForgotRecurrent(Recurrent):
    recurrent = False


class Misnames(Small):
    def prepare(self, trajectory, keys):
        return super().prepare(trajectory, keys)._replace(steps={"weight": trajectory.output.extras["values"]})


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            ForgotRecurrent,
            r"^loss\(\) must not raise, and of its first batch it raised TypeError: .* \(test_check_agent.py, line "
            r"\d+: `b, memory, log_prob = .*`\)\. If loss\(\) needs the state that .*, say recurrent = True\.$",
        ),
        (
            Misnames,
            r"^prepare\(\) must not raise, and of its first batch it raised KeyError: 'values' \(test_check_agent.py, "
            r"line \d+: `return super\(\).prepare.*`\)\.$",
        ),
    ],
)
def test_a_method_that_raises_is_named_with_its_line(kind, told):
    with pytest.raises(ContractError, match=told):
        check_agent(kind(), Catch(rows=4, columns=3), quick=True)


def test_the_quick_check_leaves_out_what_a_single_run_may_do_without():
    for agent in (UnusedParameter(), Branches(), Layered(nn.GRU(12, 12))):
        check_agent(agent, Catch(rows=4, columns=3), quick=True)
    with pytest.raises(ContractError, match="weighted by steps"):
        check_agent(ForgetsWeight(), Catch(rows=4, columns=3), quick=True)


def test_the_agent_itself_is_left_alone():
    agent = Small()
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    check_agent(agent, Catch(rows=4, columns=3), compile=False)
    assert all(torch.equal(v, before[k]) for k, v in agent.state_dict().items())
    assert all(p.grad is None for p in agent.parameters())


def test_an_odd_number_of_environments_is_refused():
    with pytest.raises(ValueError, match="num_envs=3 cannot be cut in halves"):
        check_agent(Small(), Catch(), num_envs=3)


class Crossing(TensorEnv):
    """Two choices at once, of which a mask forbids one value each."""

    def __init__(self):
        observation = {"x": Array((1,)), "action_mask": Array((5,), torch.bool)}
        self.spec = EnvSpec("crossing", observation, MultiDiscrete((2, 3)), max_episode_steps=7)

    def reset(self, keys):
        return random.uniform(keys, 1)

    def transition(self, state, action, keys):
        return random.uniform(keys, 1), action.sum(-1).float(), torch.zeros_like(state[:, 0], dtype=torch.bool)

    def observe(self, state):
        first, second = (state * 2).long(), (state * 3).long()
        mask = torch.cat([torch.arange(2) != first, torch.arange(3) != second], -1)
        return {"x": state, "action_mask": mask}


class Careless(PPO):
    """Draws as if all were allowed."""

    def act(self, timestep, state, keys, explore=True):
        everything = torch.ones_like(timestep.observation["action_mask"])
        observation = timestep.observation | {"action_mask": everything}
        return super().act(timestep._replace(observation=observation), state, keys, explore)


def test_a_mask_of_several_choices_is_kept_to():
    env = Crossing()
    check_agent(PPO(env.spec, PPOConfig(hidden=(8,))), env, compile=False)
    with pytest.raises(ContractError, match="action must be one that the action_mask allows"):
        check_agent(Careless(env.spec, PPOConfig(hidden=(8,))), env, compile=False)


def test_resets_are_tested_where_no_episode_ends():
    forgetful = prepare_with(lambda steps: steps | {"weight": torch.ones_like(steps["weight"])})
    with pytest.raises(ContractError, match=r"Batch.steps\['weight'\] must be 0 at LAST"):
        check_agent(forgetful(), Catch(rows=4, columns=3), unroll_length=2, quick=True)
    check_agent(Small(), Catch(rows=4, columns=3), unroll_length=2, quick=True)
