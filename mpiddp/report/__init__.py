"""The folder of a run, read after the fact: `mpiddp runs` lists runs, `mpiddp report` draws them."""
