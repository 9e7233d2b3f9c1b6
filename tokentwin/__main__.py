"""The entry point of `python -m tokentwin` and of the console script."""

import sys
from pathlib import Path


def run() -> None:
    """Run the command line. Ctrl-C ends it in one line, also during its import."""
    try:
        from tokentwin.cli import main
    except KeyboardInterrupt:
        print("tokentwin: interrupted", file=sys.stderr)
        sys.exit(130)
    main()


if __name__ == "__main__":
    # Python has put the working directory first; our modules lie beside this package, whatever lies there.
    if not sys.flags.safe_path and Path(sys.path[0]).resolve() != Path(__file__).resolve().parents[1]:
        del sys.path[0]
    run()
