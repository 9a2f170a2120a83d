"""What does not compile goes on uncompiled, and the line that prevented it is told: once, and in the list of losses."""

from pathlib import Path

import torch
import torchrl.objectives
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.objectives import A2CLoss

from tests.interop.actors import SPEC, categorical, critic
from tests.interop.rows import anakin
from torchpod import losses
from torchpod.algos.torchrl import LOSSES
from torchpod.anakin import train
from torchpod.compile import Compiler
from torchpod.envs.classic.cartpole import CartPole
from torchpod.interop.torchrl import LossAgent
from torchpod.learner import LearnerConfig
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


def line_of(text):
    """`file:line` of the first line of this file that has the text."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


def test_a_population_falls_back_member_by_member_and_says_once_where(seed, recwarn):
    env, text = CartPole(), 'if data["advantage"].mean().item() > 1e9:'
    many, single = (anakin(reading_agent, env, True, population=n, num_epochs=1) for n in (2, 1))
    state, _ = many.iterate(many.init(seed))
    many.iterate(state)
    assert many.compiler.fell_back
    for i in range(2):
        told = [str(w.message) for w in recwarn if "uncompiled" in str(w.message)]
        assert len(told) == 1 + i and f"{line_of(text)}, `{text}`, does not compile" in told[-1]
        ((_, program),) = train(single, single.init(seed + i), until=1)
        for name, x in program.state.learner.params.items():
            torch.testing.assert_close(state.learner.params[name][i], x, rtol=1e-4, atol=1e-5)
    assert len([w for w in recwarn if "uncompiled" in str(w.message)]) == 2


def test_an_actor_that_does_not_compile_acts_in_threads_of_its_own(seed, recwarn):
    """In Sebulba every pool has a copy of a module that runs as it is; with a fixed lag two runs are equal."""

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x) if x.sum() > -1e9 else self.layer(-x)

    def make_agent():
        module = TensorDictModule(Branching(), in_keys=["observation"], out_keys=["logits"])
        actor = categorical(module=module)
        return LossAgent(actor, A2CLoss(actor, critic()), spec=SPEC)

    def parameters():
        program = Sebulba(
            make_agent,
            CartPole,
            num_envs=4,
            unroll_length=8,
            num_iterations=6,
            learner=LearnerConfig(),
            compiler=Compiler(True),
            config=SebulbaConfig(num_actor_threads=2, lag=0),
        )
        for _, running in train_sebulba(program, program.init(seed)):
            state = running.state
        return state.learner.params

    results = [parameters(), parameters()]
    text = "return self.layer(x) if x.sum() > -1e9 else self.layer(-x)"
    told = [str(w.message) for w in recwarn if "uncompiled" in str(w.message)]
    assert all(f"{line_of(text)}, `{text}`, does not compile" in x for x in told)
    assert len(set(told)) == 1, told  # Python shows but once what each pool's program says
    for name, x in results[0].items():
        assert torch.equal(x, results[1][name]), name


def test_the_verdicts_are_those_of_the_installed_torchrl(capsys):
    assert losses.main() == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: line for line in lines[1:]}
    assert torchrl.__version__ in lines[0] and "traced for a CPU" in lines[0]
    for name in LOSSES:
        assert ("compiles whole" if hasattr(torchrl.objectives, name) else "unsupported") in found[name]
    assert {name for name in dir(torchrl.objectives) if name.endswith("Loss")} <= found.keys()
    for name in found.keys() - LOSSES.keys():
        assert ("unsupported" if name in losses.OTHERS else "by hand") in found[name] and "loss=" not in found[name][
            :40
        ]
    assert "by hand" in found["TD3BCLoss"] and "parameters that no update reaches" in found["DiscreteCQLLoss"]


def test_a_loss_that_falls_back_is_told_with_the_line_that_does_not_compile(monkeypatch, capsys):
    monkeypatch.setattr(losses, "LOSSES", {"A2CLoss": LOSSES["A2CLoss"]})
    monkeypatch.setattr(losses, "torchrl_agent", lambda *args: reading_agent())
    assert losses.main() == 0
    row, text = capsys.readouterr().out.splitlines()[1], 'if data["advantage"].mean().item() > 1e9:'
    assert row.startswith("A2CLoss") and "falls back" in row and "loss=A2CLoss" in row
    assert f"{line_of(text)}, `{text}`" in row, row
