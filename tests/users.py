"""Files that a user would have, and settings of runs that are over at once."""

from pathlib import Path

ENV_FILE = Path(__file__).parent / "user_env.py"
AGENT_FILE = Path(__file__).parent / "user_agent.py"
TINY = (
    "compile=false",
    "logger.console=false",
    "num_envs=16",
    "total_env_steps=1",
    "algo.unroll_length=16",
    "evaluation.episodes=1",
)
