"""One module for each program that starts ranks: from a request to its command line."""
