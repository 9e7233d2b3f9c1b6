"""Results of tests of claims about inference; `lab.claims` runs the tests."""
