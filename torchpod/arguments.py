"""The options of a command."""

import argparse
from typing import NoReturn

from torchpod.config import ConfigError


class Parser(argparse.ArgumentParser):
    """As argparse has it, but what is wrong is a `ConfigError` of one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raises it."""
        raise ConfigError(f"{self.prog}: {message}; {self.prog} --help shows what it takes.")
