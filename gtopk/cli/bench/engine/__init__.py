"""`gtopk bench engine`: what it costs that operations are matched by name."""
