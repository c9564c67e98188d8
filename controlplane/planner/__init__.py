"""The offline planner: which fleet for which traffic and objectives, how far from the possible, and why."""
