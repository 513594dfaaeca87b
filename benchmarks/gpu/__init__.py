"""What only a GPU can show: that the GPU code is right, and how fast it is. Guide: docs/evidence/gpu.md.

kit.py, images.py     what a machine without MPI and network needs, in pieces
stages.py, run.py     the stages in their groups; a group within its time
correct.py, exact.py  stages of correctness
speed.py              stages that measure
stage.py, jobs.py     what a stage gets: a record, sizes, commands
report.py             the tables of docs/
ranks/                the code of the stages' ranks
"""
