"""A child of a server that leaves its output to a process of its own."""

import subprocess
import sys

if __name__ == "__main__":
    sys.stdin.readline()
    heir = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    sys.stdout.write(f"{heir.pid}\n")
    sys.stdout.flush()
    heir.wait(60)
