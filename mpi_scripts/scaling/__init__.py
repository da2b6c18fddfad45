"""`gtopk bench scaling`: steps of training beside S-SGD, DDP, and the published table."""
