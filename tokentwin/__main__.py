"""The entry point of `python -m tokentwin` and of the console script."""

import sys


def run() -> None:
    """Run the command line. On Ctrl-C, even during its import, print one line and end."""
    try:
        from tokentwin.cli import main
    except KeyboardInterrupt:
        print("tokentwin: interrupted", file=sys.stderr)
        sys.exit(130)
    main()


if __name__ == "__main__":
    run()
