"""Games of several agents, in groups."""
