"""What `torchpod COMMAND` does, a module each; `main` chooses."""
