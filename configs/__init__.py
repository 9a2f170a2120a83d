"""Hydra groups: algo/ env/ loop/ logger/ experiment/. A package, so that they travel in the wheel."""

if __name__ == "configs":
    raise ImportError("import torchpod.configs, not configs")
