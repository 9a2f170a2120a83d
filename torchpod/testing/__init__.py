"""Conformance tests for your own environments and agents, and probe environments to debug agents with.

`check_env` and `check_agent` raise a `ContractError` whose message is the rule that was broken; `check_consistency`
compares an environment with one in plain Python, and says where they differ first.
"""

from torchpod.testing import probes
from torchpod.testing.agents import check_agent
from torchpod.testing.consistency import ConsistencyError, check_consistency
from torchpod.testing.contract import ContractError
from torchpod.testing.envs import check_env

__all__ = ["ConsistencyError", "ContractError", "check_agent", "check_consistency", "check_env", "probes"]
