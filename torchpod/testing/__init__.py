"""Conformance tests for your own environments and agents, and probe environments to debug agents with.

`check_env` and `check_agent` raise a `ContractError` whose message is the rule that was broken.
"""

from torchpod.testing import probes
from torchpod.testing.agents import check_agent
from torchpod.testing.contract import ContractError
from torchpod.testing.envs import check_env

__all__ = ["ContractError", "check_agent", "check_env", "probes"]
