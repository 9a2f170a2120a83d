"""Tasks of bsuite, Osband et al. 2020 (https://arxiv.org/abs/1908.03568)."""
