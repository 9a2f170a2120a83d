"""What is below `torch.compile`: passes over inductor's graphs, our own kernels for CPU and GPU, calls from C++."""
