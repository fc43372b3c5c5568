"""`trainkit report`: one page of HTML about runs, which needs nothing but a browser."""
