"""The entry point of `python -m tokentwin` and of the console script."""

import sys
from pathlib import Path


def run() -> None:
    """Run the command line. On Ctrl-C, even during its import, print one line and end."""
    try:
        from tokentwin.cli import main
    except KeyboardInterrupt:
        print("tokentwin: interrupted", file=sys.stderr)
        sys.exit(130)
    main()


if __name__ == "__main__":
    # Python searches modules first in the working directory, which may hold modules with our names. Our packages lie
    # beside this one.
    if not sys.flags.safe_path and Path(sys.path[0]).resolve() != Path(__file__).resolve().parents[1]:
        del sys.path[0]
    run()
