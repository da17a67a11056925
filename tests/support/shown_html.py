"""What a browser would make of a page: its elements, and what it would run."""

from html.parser import HTMLParser

EVIL = "'\"><img src=x onerror=alert(1)><script>alert(1)</script>"
VOID = {"br", "img", "input", "hr", "meta"}


class Tags(HTMLParser):
    """Collects the elements of a page, and those of the pages inside its frames."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.handlers: list[str] = []
        self.texts: list[str] = []
        self.frames: list[Tags] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.frames += [Tags(v or "") for name, v in attrs if name == "srcdoc"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.texts.append(data if self.open[-1:] == ["script"] else "")

    @property
    def runs(self) -> str:
        """What a browser would run of the page."""
        told = [*self.handlers, *self.texts, *(frame.runs for frame in self.frames)]
        return " ".join(told)
