"""`python -m tokentwin`: the command line, where no script is installed."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python has put the working directory first; whatever lies in it, our modules are those beside this package.
    if not sys.flags.safe_path and Path(sys.path[0]).resolve() != Path(__file__).resolve().parents[1]:
        del sys.path[0]

    from tokentwin.cli import main

    main()
