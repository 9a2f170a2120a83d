"""Plain PyTorch PPO on EnvPool in one file, in the usual style: the peer of suite `sebulba`.

    python bench/peers/plain_ppo.py --task Pong-v5 --num-envs 8

Eager modules, one thread that steps the pool and then learns, generalised advantages in a Python loop, shuffled
minibatches, Adam. It imports nothing of torchpod, and does the same work: networks, batch, epochs, minibatches, options
of the environments. EnvPool's reset steps are learned from, as is usual; they are not counted as environment steps.
"""

import argparse
import json
import os
import platform
import time

import envpool
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal

LENGTH, EPOCHS, MINIBATCHES = 128, 4, 4
GAMMA, LAMBDA, CLIP, VALUE_COEFFICIENT, ENTROPY_COEFFICIENT, MAX_NORM = 0.99, 0.95, 0.2, 0.5, 0.01, 0.5
LEARNING_RATE = 2.5e-4


def layer(module, gain=2**0.5):
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


def mlp(size):
    return nn.Sequential(layer(nn.Linear(size, 64)), nn.Tanh(), layer(nn.Linear(64, 64)), nn.Tanh())


def nature(channels):
    return nn.Sequential(
        layer(nn.Conv2d(channels, 32, 8, 4)),
        nn.ReLU(),
        layer(nn.Conv2d(32, 64, 4, 2)),
        nn.ReLU(),
        layer(nn.Conv2d(64, 64, 3, 1)),
        nn.ReLU(),
        nn.Flatten(),
        layer(nn.Linear(3136, 512)),
        nn.ReLU(),
    )


class Agent(nn.Module):
    """Two MLPs for vectors, one shared CNN for images."""

    def __init__(self, observation_space, action_space):
        super().__init__()
        self.images = len(observation_space.shape) == 3
        self.discrete = hasattr(action_space, "n")
        outputs = int(action_space.n) if self.discrete else action_space.shape[0]
        size = 512 if self.images else 64
        self.body = nature(observation_space.shape[0]) if self.images else mlp(observation_space.shape[0])
        self.value_body = None if self.images else mlp(observation_space.shape[0])
        self.policy, self.value = layer(nn.Linear(size, outputs), 0.01), layer(nn.Linear(size, 1), 1.0)
        if not self.discrete:
            self.log_std = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        x = x.float() / 255 if self.images else x.float()
        features = self.body(x)
        out = self.policy(features)
        value = self.value(features if self.value_body is None else self.value_body(x)).squeeze(-1)
        if self.discrete:
            return Categorical(logits=out), value
        return Independent(Normal(out, self.log_std.exp()), 1), value


class Trainer:
    """Steps the pool, keeps what was seen, learns from it."""

    def __init__(self, task, num_envs, seed, pool_threads):
        torch.manual_seed(seed)
        options = {"reward_clip": True, "episodic_life": True} if task.startswith("Pong") else {}
        self.envs = envpool.make_gymnasium(task, num_envs=num_envs, seed=seed, num_threads=pool_threads, **options)
        self.agent = Agent(self.envs.observation_space, self.envs.action_space)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), LEARNING_RATE, eps=1e-5)
        self.observation, self.done = torch.as_tensor(self.envs.reset()[0]), np.zeros(num_envs, bool)
        self.num_envs = num_envs

    def rollout(self):
        rows, steps = [], 0
        for _ in range(LENGTH):
            with torch.no_grad():
                distribution, value = self.agent(self.observation)
                action = distribution.sample()
                log_prob = distribution.log_prob(action)
            native = action.numpy() if self.agent.discrete else action.numpy().clip(-1, 1).astype(np.float64)
            observation, reward, terminated, truncated, _ = self.envs.step(native)
            steps += int((~self.done).sum())
            rows.append((self.observation, action, log_prob, value, torch.as_tensor(reward).float(), self.done))
            self.observation, self.done = torch.as_tensor(observation), terminated | truncated
        columns = zip(*rows, strict=True)
        return [torch.stack([torch.as_tensor(x) for x in column]) for column in columns], steps

    def update(self, rows):
        observation, action, old_log_prob, value, reward, done = rows
        with torch.no_grad():
            following, alive = self.agent(self.observation)[1], 1.0 - torch.as_tensor(self.done).float()
            advantage, running = torch.zeros_like(value), torch.zeros(self.num_envs)
            for t in reversed(range(LENGTH)):
                error = reward[t] + GAMMA * alive * following - value[t]
                running = error + GAMMA * LAMBDA * alive * running
                advantage[t], following, alive = running, value[t], 1.0 - done[t].float()
        flat = [x.flatten(0, 1) for x in (observation, action, old_log_prob, value, advantage, advantage + value)]
        count = LENGTH * self.num_envs
        for _ in range(EPOCHS):
            for index in torch.randperm(count).chunk(MINIBATCHES):
                x, a, old, v, adv, target = (column[index] for column in flat)
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                distribution, new = self.agent(x)
                ratio = (distribution.log_prob(a) - old).exp()
                policy_loss = -torch.minimum(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv).mean()
                clipped = v + (new - v).clamp(-CLIP, CLIP)
                value_loss = torch.maximum((new - target) ** 2, (clipped - target) ** 2).mean() / 2
                loss = policy_loss + VALUE_COEFFICIENT * value_loss
                loss = loss - ENTROPY_COEFFICIENT * distribution.entropy().mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), MAX_NORM)
                self.optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--mode", choices=["policy", "update"], default="update")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pool-threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    trainer = Trainer(args.task, args.num_envs, args.seed, args.pool_threads)
    env_steps, wall_s, cpu_s = [], [], []
    for _ in range(1 + args.repeats):
        wall, cpu, total = time.perf_counter(), time.process_time(), 0
        for _ in range(args.iterations):
            rows, steps = trainer.rollout()
            if args.mode == "update":
                trainer.update(rows)
            total += steps
        env_steps.append(float(total))
        wall_s.append(time.perf_counter() - wall)
        cpu_s.append(time.process_time() - cpu)
    env_steps, wall_s, cpu_s = env_steps[1:], wall_s[1:], cpu_s[1:]
    measurement = {
        "framework": "plain",
        "mode": args.mode,
        "num_envs": args.num_envs,
        "unroll_length": LENGTH,
        "epochs": EPOCHS,
        "minibatches": MINIBATCHES,
        "batch_rows": LENGTH * args.num_envs,
        "param_count": sum(p.numel() for p in trainer.agent.parameters()),
        "dtype": ",".join(sorted({str(p.dtype).removeprefix("torch.") for p in trainer.agent.parameters()})),
        "iterations": args.iterations,
        "total_iterations": args.iterations * (1 + args.repeats),
        "compile_s": 0.0,
        "env_steps": env_steps,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "episode_return": None,
        "episodes": 0,
        "threads": {"torch": args.threads, "pool": args.pool_threads},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    print(json.dumps(measurement))


if __name__ == "__main__":
    main()
