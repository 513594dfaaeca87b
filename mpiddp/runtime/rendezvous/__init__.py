"""How the ranks find each other: one record, over a channel or MPI."""
