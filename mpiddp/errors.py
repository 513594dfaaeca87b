"""The one exception that people read: a sentence about their input, never a traceback.

Everything else that is raised is a bug or a failed job, and keeps its traceback.
"""


class UserError(Exception):
    """Bad input: one sentence with what was found, what was expected and what mends it.

    The command line prints it on stderr, once per job, and exits with code 2.
    """
