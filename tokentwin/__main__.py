"""`python -m tokentwin`: the command line, where no script is installed."""

from tokentwin.cli import main

if __name__ == "__main__":
    main()
