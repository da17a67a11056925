"""What no log may hold: tokens and private keys of the clusters that tests start."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, final

from jgraph.launch.local.cluster import LocalCluster
from jgraph.rpc.security.token import NAME, Token

_HEX: Final = re.compile(r"[0-9a-f]{64,}")
_KEY: Final = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY")


@final
class Leaks:
    """Learns every token that this process reads, and looks for them in texts.

    Attributes:
      found: what was found and not told yet, a sentence each.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self._secrets: set[str] = set()

    def look(self, texts: Iterable[tuple[str, str]]) -> None:
        """Looks through texts; each comes after what it is called."""
        for name, text in texts:
            if _KEY.search(text):
                self.found.append(f"{name} has a private key")
            if any(self._is_secret(digits) for digits in _HEX.findall(text)):
                self.found.append(f"{name} has the token of a cluster")

    def look_into(self, directory: Path) -> None:
        """Looks through the logs of a directory, for its tokens as well."""
        self._secrets |= {_text(path).strip() for path in directory.rglob(NAME)}
        self.look((path.name, _text(path)) for path in directory.rglob("*.log"))

    def told(self) -> str:
        """Returns what was found since the last time."""
        text, self.found = "\n".join(self.found), []
        return text

    def watch(self) -> None:
        """From now on learns the tokens of this process, and looks at local clusters.

        Their logs go with them, so it looks when their processes have ended.
        """
        read: Any = vars(Token)["read"].__func__
        forget = LocalCluster._forget_files
        secrets, look_into = self._secrets, self.look_into

        def read_and_learn(cls: type[Token], path: Path) -> Token:
            token: Token = read(cls, path)
            secrets.add(token.value)
            return token

        def look_and_forget(self: LocalCluster) -> None:
            look_into(self._directory)
            forget(self)

        Token.read = classmethod(read_and_learn)  # type: ignore[method-assign,assignment]
        LocalCluster._forget_files = look_and_forget  # type: ignore[method-assign]

    def _is_secret(self, digits: str) -> bool:
        # Beside others they may be part of a longer number.
        return any(digits[at : at + 64] in self._secrets for at in range(len(digits)))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # a directory of that name, or gone meanwhile
        return ""
