"""Agents of a user's own, as a file beside a run: they fail after a while."""

from pathlib import Path

from torchpod.algos.ppo import PPO, PPOConfig


class Forgetful(PPO):
    """Cannot learn any more after 120 minibatches."""

    count, error = 0, ArithmeticError

    def __init__(self, spec, config: PPOConfig):
        super().__init__(spec, config)

    def loss(self, batch, keys, target):
        Forgetful.count += 1
        if Forgetful.count > 120:
            Path("fault").touch()
            raise self.error("what was it about?")
        return super().loss(batch, keys, target)


class Mistaken(Forgetful):
    """With an error that says at the start of a run what setting is wrong."""

    error = ValueError


class Offline(Forgetful):
    error = ConnectionRefusedError


class Piped(Forgetful):
    error = BrokenPipeError
