"""What does not compile goes on uncompiled, and the line that prevented it is told: once, and in the list of losses."""

import warnings
from pathlib import Path

import pytest
import torch
import torchrl.objectives
from tensordict.nn import TensorDictModule
from torch import nn
from torch.utils import _pytree as pytree
from torchrl.data import Categorical
from torchrl.modules import QValueActor
from torchrl.objectives import A2CLoss, DQNLoss, LossModule

from tests.interop.actors import SPEC, categorical, critic
from tests.interop.rows import THERE, B, anakin, config, env_for
from torchpod import random
from torchpod.agent import variables_of
from torchpod.algos.torchrl import LOSSES, torchrl_agent
from torchpod.anakin import Anakin
from torchpod.anakin import train as train_anakin
from torchpod.commands import losses
from torchpod.compile import Compiler
from torchpod.envs.classic.cartpole import CartPole
from torchpod.interop.torchrl import LossAgent
from torchpod.interop.unfit import UNSUPPORTED
from torchpod.kernels.inductor import trace
from torchpod.learner import LearnerConfig
from torchpod.replay import ReplayConfig
from torchpod.rollout import make_step, start
from torchpod.sebulba import Sebulba, SebulbaConfig
from torchpod.sebulba import train as train_sebulba


class Reading(A2CLoss):
    """Tests a number, which no program has."""

    def forward(self, data):
        if data["advantage"].mean().item() > 1e9:
            raise ValueError("such advantages cannot be")
        return super().forward(data)


def reading_agent():
    actor = categorical()
    return LossAgent(actor, Reading(actor, critic()), spec=SPEC)


class ReadingNet(nn.Module):
    """As well."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) if x.sum().item() > -1e9 else self.layer(-x)


def agent_of_a_reading_actor():
    actor = categorical(module=TensorDictModule(ReadingNet(), in_keys=["observation"], out_keys=["logits"]))
    return LossAgent(actor, A2CLoss(actor, critic()), spec=SPEC)


def agent_of_a_reading_network():
    actor = QValueActor(ReadingNet(), in_keys=["observation"], spec=Categorical(2))
    return LossAgent(actor, DQNLoss(actor, action_space="categorical", delay_value=True), spec=SPEC, epsilon=0.1)


def line_of(text):
    """`file:line` of the first line of this file that has the text."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


@pytest.mark.slow
@pytest.mark.parametrize("population", [1, 2])
def test_a_loss_that_falls_back_learns_as_uncompiled_and_says_once_where(population, seed, recwarn):
    """Member by member, if there are several."""
    env, text = CartPole(), 'if data["advantage"].mean().item() > 1e9:'
    compiled, uncompiled = (
        anakin(reading_agent, env, enabled, population=size, num_epochs=1)
        for enabled, size in ((True, population), (False, 1))
    )
    state, _ = compiled.iterate(compiled.init(seed))
    compiled.iterate(state)
    assert compiled.compiler.fell_back
    (told,) = [str(w.message) for w in recwarn if "uncompiled" in str(w.message)]
    assert f"{line_of(text)}, `{text}`, does not compile" in told
    for i in range(population):
        alone, _ = uncompiled.iterate(uncompiled.init(seed + i))
        for name, x in alone.learner.params.items():
            found = state.learner.params[name]
            torch.testing.assert_close(found if population == 1 else found[i], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loop", ["anakin", "sebulba"])
def test_an_agent_with_replay_that_falls_back_learns_as_uncompiled_and_says_once_where(loop, seed, recwarn):
    ends = []
    for enabled in (True, False):
        own = {
            "num_envs": 4,
            "unroll_length": 8,
            "num_iterations": 6,
            "learner": LearnerConfig(num_epochs=1, num_minibatches=2),
            "compiler": Compiler(enabled),
            "replay": ReplayConfig(256, batch_size=16, min_size=64),
        }
        if loop == "anakin":
            run, train = Anakin(agent_of_a_reading_network, CartPole(), **own), train_anakin
        else:
            run = Sebulba(agent_of_a_reading_network, CartPole, config=SebulbaConfig(2, lag=0), **own)
            train = train_sebulba
        for _, running in train(run, run.init(seed)):
            state = running.state
        assert run.compiler.fell_back == enabled
        ends.append(state.learner)
    (told,) = [str(w.message) for w in recwarn if "uncompiled" in str(w.message)]
    assert "return self.layer(x) if x.sum().item() > -1e9" in told and ends[0].num_steps > 0
    torch.testing.assert_close(ends[0].params, ends[1].params, rtol=1e-4, atol=1e-5)


def trained_by_sebulba(make_agent, seed, *, iterations, compiled=True):
    """The parameters that two actors and a learner end with."""
    program = Sebulba(
        make_agent,
        CartPole,
        num_envs=4,
        unroll_length=8,
        num_iterations=iterations,
        learner=LearnerConfig(),
        compiler=Compiler(compiled),
        config=SebulbaConfig(num_actor_threads=2, lag=0),
    )
    for _, running in train_sebulba(program, program.init(seed)):
        state = running.state
    return state.learner.params


@pytest.mark.slow
def test_a_loss_that_falls_back_learns_in_sebulba_as_uncompiled(seed, recwarn):
    own = {"iterations": 1}
    found, uncompiled = (trained_by_sebulba(reading_agent, seed, compiled=x, **own) for x in (True, False))
    (told,) = [str(w.message) for w in recwarn if "uncompiled" in str(w.message)]
    assert 'if data["advantage"].mean().item() > 1e9:' in told
    torch.testing.assert_close(found, uncompiled, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules")  # which tensordict asks for
@pytest.mark.parametrize("name", THERE)
def test_actors_compile_whole(name, seed):
    """Also that of DistributionalDQNLoss, which tests whether it was given logarithms of probabilities."""
    env = env_for(name)
    agent = torchrl_agent(env.spec, config(name))
    keys = random.split(random.key(seed), B)
    params, buffers = variables_of(agent)
    step, args = make_step(agent, env), (params | buffers, start(agent, env, keys), keys, keys)
    graph, *_ = trace(step, args)
    found = graph(*(x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)))
    with torch.no_grad():
        torch.testing.assert_close(list(found), pytree.tree_leaves(step(*args)))


@pytest.mark.slow
def test_an_actor_that_does_not_compile_acts_in_threads_of_its_own(seed):
    """In Sebulba every pool has a copy of a module that runs as it is; with a fixed lag two runs are equal.

    The actors and the update run the same line, of which each run speaks once.
    """
    results, text = [], "return self.layer(x) if x.sum().item() > -1e9 else self.layer(-x)"
    for _ in range(2):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            results.append(trained_by_sebulba(agent_of_a_reading_actor, seed, iterations=6))
        (told,) = [str(w.message) for w in found if "uncompiled" in str(w.message)]
        assert f"{line_of(text)}, `{text}`, does not compile" in told
    for name, x in results[0].items():
        assert torch.equal(x, results[1][name]), name


@pytest.mark.slow
def test_the_verdicts_are_those_of_the_installed_torchrl(monkeypatch, capsys):
    monkeypatch.setattr(torchrl.objectives, "BoldLoss", type("BoldLoss", (LossModule,), {}), raising=False)
    assert losses.main() == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: line for line in lines[1:]}
    assert torchrl.__version__ in lines[0] and "traced for a CPU" in lines[0]
    for name in LOSSES:
        assert ("compiles whole" if hasattr(torchrl.objectives, name) else "unsupported") in found[name]
    assert {name for name in dir(torchrl.objectives) if name.endswith("Loss")} <= found.keys()
    for name in found.keys() - LOSSES.keys():
        assert ("unsupported" if name in UNSUPPORTED else "by hand") in found[name] and "loss=" not in found[name][:40]
    assert "by hand" in found["BoldLoss"] and "parameters that no update reaches" in found["DiscreteCQLLoss"]


def test_a_loss_that_falls_back_is_told_with_the_line_that_does_not_compile(monkeypatch, capsys):
    monkeypatch.setattr(losses, "LOSSES", {"A2CLoss": LOSSES["A2CLoss"]})
    monkeypatch.setattr(losses, "torchrl_agent", lambda *args: reading_agent())
    assert losses.main() == 0
    row, text = capsys.readouterr().out.splitlines()[1], 'if data["advantage"].mean().item() > 1e9:'
    assert row.startswith("A2CLoss") and "falls back" in row and "loss=A2CLoss" in row
    assert f"{line_of(text)}, `{text}`" in row, row
