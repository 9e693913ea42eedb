"""What the tests share: typed calls, their generators, and comparisons with the oracle."""
