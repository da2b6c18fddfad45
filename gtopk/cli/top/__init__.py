"""`gtopk top`: a run while it goes on, one line for each rank."""
