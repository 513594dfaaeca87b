"""How the ranks find each other: one record, over MPI or by address."""

from __future__ import annotations


class FinalizedMPI:
    """Finds no module, and raises an ImportError for mpi4py.MPI, that says what to do instead.

    Every function of a finalized MPI aborts the process, and an MPI of a script's own would be rank 0 of 1.
    Libraries that only ask whether MPI is there (PyTorch Lightning 2.6 calls MPI.COMM_WORLD.Get_size()) catch
    the error, and continue without MPI.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "mpi4py.MPI":
            raise ImportError(
                "mpiddp has finalized the MPI of this rank. To use mpi4py in the script, start it with "
                "mpirun itself, and call mpiddp.init(keep_mpi=True)",
                name=fullname,
            )
