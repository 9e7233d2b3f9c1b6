"""What became of claims about inference; `lab.claims` puts them to the test."""
