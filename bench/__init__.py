"""Benchmarks: `torchpod bench SUITE`."""

if __name__ == "bench":
    raise ImportError("import torchpod.bench, not bench")
