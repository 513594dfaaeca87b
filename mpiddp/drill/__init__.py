"""`mpiddp drill`: run a script with faults, and compare each resumed run with an undisturbed one."""
