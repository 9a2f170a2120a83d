"""Agents, one file each. MAKERS maps a name to the class that makes it."""

if __name__ == "algos":
    raise ImportError("import torchpod.algos, not algos")
