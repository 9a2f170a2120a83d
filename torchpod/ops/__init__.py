"""Pure functions on tensors: returns, distributions, scans. They import torch alone."""
