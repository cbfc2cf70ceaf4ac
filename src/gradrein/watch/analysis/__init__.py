"""What is concluded from a `Run`: findings, advice, comparison."""
