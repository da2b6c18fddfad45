"""`gtopk report`: a run's record as one page, with plots."""
