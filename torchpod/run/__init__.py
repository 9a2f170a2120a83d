"""A training run from configuration to summary; `execute.py` first."""
