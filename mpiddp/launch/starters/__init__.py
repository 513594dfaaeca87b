"""One module for each program that starts ranks. Each turns a request into a command line."""
