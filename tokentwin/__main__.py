"""`python -m tokentwin`, and the console script: the command line, once it is imported."""

import sys
from pathlib import Path


def run() -> None:
    """Run the command line. Ctrl-C ends it in one line, also while it is imported."""
    try:
        from tokentwin.cli import main
    except KeyboardInterrupt:
        print("tokentwin: interrupted", file=sys.stderr)
        sys.exit(130)
    main()


if __name__ == "__main__":
    # Python has put the working directory first; whatever lies in it, our modules are those beside this package.
    if not sys.flags.safe_path and Path(sys.path[0]).resolve() != Path(__file__).resolve().parents[1]:
        del sys.path[0]
    run()
