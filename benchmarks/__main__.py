"""``python -m benchmarks NAME …`` runs one; ``selection`` runs ten minutes of them."""

import os
import sys


def main() -> None:
    name, *options = sys.argv[1:] or ["--help"]
    if name.startswith("-"):
        print(__doc__)
        return
    # In place of this process: what it spawns must find its own main module.
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
