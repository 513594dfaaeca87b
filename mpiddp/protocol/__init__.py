"""What a launcher and its ranks agree on: the variables, the messages, and the bytes of a function.

Standard library only. Neither `mpiddp.launch` nor `mpiddp.runtime` imports the other; both import this.
"""
