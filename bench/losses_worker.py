"""One side of the `losses` suite: updates with a TorchRL loss by torchpod, or as TorchRL's users write them.

taskset -c 0 python -m torchpod.bench.losses_worker --loss SACLoss --rows 256 --hidden 64 --side torchpod
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils import _pytree as pytree
from torchrl.objectives import SoftUpdate

from torchpod import random
from torchpod.agent import Agent, variables_of
from torchpod.algos.torchrl import CONTINUOUS, TorchRLConfig, parts, torchrl_agent
from torchpod.bench.rates import report
from torchpod.compile import Compiler
from torchpod.env import Env
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.learner import Learner, LearnerConfig
from torchpod.rollout import make_step, start, unroll
from torchpod.types import Trajectory

NUM_ENVS, RATE, TAU, MAX_NORM = 16, 3e-4, 0.005, 10.0
SIDES = ("torchpod", "torchrl")
BEGUN_AGAIN = 500
"""Updates after which ours begins anew: by thousands on one batch a policy leaves it so far that its KL overflows."""


def env_for(loss: str) -> Env:
    """A task that the loss is for."""
    return Pendulum() if loss in CONTINUOUS else CartPole()


def config_of(loss: str, hidden: tuple[int, ...]) -> TorchRLConfig:
    """Networks and settings of both sides."""
    return TorchRLConfig(loss, hidden=hidden, activation="relu", normalize_advantage=False, target_rate=TAU)


def data_for(agent: Agent, env: Env, rows: int, seed: int) -> tuple[Trajectory, Tensor]:
    """One trajectory, of so many steps."""
    keys = random.split(random.key(seed), NUM_ENVS)
    params, buffers = variables_of(agent)
    with torch.no_grad():
        carry = start(agent, env, keys)
        return unroll(make_step(agent, env), params | buffers, carry, keys, keys, length=rows // NUM_ENVS)[1], keys


def ours(loss: str, hidden: tuple[int, ...], rows: int, seed: int) -> tuple[Callable[[], Tensor], int]:
    """An update by the learner, and the number of parameters."""
    env = env_for(loss)
    agent = torchrl_agent(env.spec, config_of(loss, hidden))
    settings = LearnerConfig(
        num_epochs=1,
        num_minibatches=1,
        learning_rate=RATE,
        anneal_learning_rate=False,
        max_grad_norm=MAX_NORM,
        epsilon=1e-8,
    )
    learner = Learner(agent, settings, num_iterations=1, compiler=Compiler(True))
    trajectory, keys = data_for(agent, env, rows, seed)
    state = learner.init(*variables_of(agent))
    with torch.no_grad():
        batch = agent.prepare(trajectory, keys)
    minibatches = learner.dealer.deal(batch, keys, torch.tensor(0))
    num_chunks = learner.dealer.num_chunks(minibatches.steps, dealt=True)
    chunks = learner.dealer.cut(minibatches, num_chunks)
    root, count, first = random.key(seed), 0, pytree.tree_map(torch.clone, state)

    def update() -> Tensor:
        nonlocal state, count
        count += 1
        if count % BEGUN_AGAIN == 0:
            state = pytree.tree_map(torch.clone, first)
        key = random.at(root, count)
        begin = learner._begin(state, num_chunks, key, lambda: minibatches)
        state, metrics, _ = learner._steps(state, chunks, (key,), *begin)
        state = state._replace(buffers=buffers | state.buffers)
        return metrics[0]

    buffers = state.buffers
    return update, sum(x.numel() for x in state.params.values())


def theirs(loss: str, hidden: tuple[int, ...], rows: int, seed: int) -> tuple[Callable[[], Tensor], int]:
    """An update as in TorchRL's examples, uncompiled, and the number of parameters."""
    env, config = env_for(loss), config_of(loss, hidden)
    with torch.random.fork_rng():  # its networks are those of the loss below
        agent = torchrl_agent(env.spec, config)
    trajectory, keys = data_for(agent, env, rows, seed)
    with torch.no_grad():
        steps = pytree.tree_map(lambda x: x.flatten(0, 1), agent.prepare(trajectory, keys).steps)
    del steps["weight"]
    for tree, names in ((steps, ("advantage", "value_target", "state_value")), (steps.get("next", {}), _COLUMNS)):
        for name in names:
            if name in tree:
                tree[name] = tree[name].unsqueeze(-1)
    if loss == "DistributionalDQNLoss":
        steps["action"] = torch.nn.functional.one_hot(steps["action"], env.spec.action.num_values)
    data = TensorDict(steps, batch_size=[rows])
    module: Any = parts(env.spec, config).loss
    updater = None
    if any(name.startswith("target_") for name, _ in module.named_children()):
        updater = SoftUpdate(module, tau=TAU)
    module(data.clone())
    own = [x for x in module.parameters() if x.requires_grad]
    optimizer = torch.optim.Adam(own, lr=RATE)

    def update() -> Tensor:
        optimizer.zero_grad()
        out = module(data.clone(False))
        total = torch.stack([x for name, x in out.items() if name.startswith("loss")]).sum()
        total.backward()
        torch.nn.utils.clip_grad_norm_(own, MAX_NORM)
        optimizer.step()
        if updater is not None:
            updater.step()
        return total.detach()

    return update, sum(x.numel() for x in own)


_COLUMNS = ("reward", "done", "terminated")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loss", required=True)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=64, help="of two layers")
    parser.add_argument("--side", choices=SIDES, default="torchpod")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a timed call, about")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    make = ours if args.side == "torchpod" else theirs
    update, num_params = make(args.loss, (args.hidden, args.hidden), args.rows, args.seed)
    work = {
        "mode": "update",
        "num_envs": NUM_ENVS,
        "unroll_length": args.rows // NUM_ENVS,
        "batch_rows": args.rows,
        "param_count": num_params,
    }
    rates = {"seconds": args.seconds, "repeats": args.repeats}
    told = report(update, framework=args.side, work=work, **rates)
    assert update().isfinite().all()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
