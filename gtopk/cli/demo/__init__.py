"""`gtopk demo`: dense, top-k and gTop-k side by side, on real data and real MPI ranks."""
