"""`gtopk bench optimizer`: what DistributedOptimizer costs a step, and what of it overlap hides."""
