"""What a script calls: the process group, the mesh, the steps and the comparison of its ranks."""
