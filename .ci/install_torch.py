"""Install torch: a CPU wheel where one can be had for this Python, the default build otherwise."""

from __future__ import annotations

import subprocess
import sys

PREFERRED = "2.13.0"


def pip(*arguments: str) -> bool:
    """Run pip and say whether it succeeded."""
    return subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=False).returncode == 0


if __name__ == "__main__":
    if not pip(f"torch=={PREFERRED}") and not pip("torch>=2.7"):
        sys.exit("torch could not be installed; install it by hand, then run make again")
