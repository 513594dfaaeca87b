"""How the ranks find each other: one record, over MPI or by address."""
