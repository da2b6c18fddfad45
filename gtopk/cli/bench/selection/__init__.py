"""`gtopk bench selection`: what accumulating and selecting costs, against `a += g` and others."""
