"""`batch.micro: auto`: the search for the largest micro batch that fits, and the trial steps that it takes."""
