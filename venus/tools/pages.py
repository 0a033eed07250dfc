"""Read one web page as text: through Jina Reader, which renders it, or by a plain fetch."""

import re
import time
from html.parser import HTMLParser
from urllib.parse import urljoin

from venus.services.http import CallError, RefusedError, Reply, TryError, exchange

MAX_BYTES, MAX_HOPS = 4 << 20, 5  # of a page; redirects followed
# of Jina, in an answer that says 200
WARNINGS = re.compile(r"Target URL returned error \d+|requiring CAPTCHA", re.IGNORECASE)
AGENT_HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; Venus research agent)",
    "Accept": "text/html,text/plain;q=0.9,*/*;q=0.5",
}


class PageError(Exception):
    """This page cannot be had: it is gone, forbidden, empty or no text. Another page may be."""


class Jina:
    """Reads a page through Jina Reader, which renders it and turns it into markdown."""

    def __init__(self, base: str, key: str, proxy: str | None):
        self.base = base.rstrip("/") + "/"
        self.key = key
        self.proxy = proxy

    def __call__(self, url: str, seconds: float) -> str:
        """One try: the text of the page. PageError for a page that Jina cannot get,
        RefusedError when it refuses us.
        """
        headers = {
            "Authorization": f"Bearer {self.key}",
            "Accept": "application/json",
            "X-Timeout": str(max(int(seconds) - 1, 1)),
            "X-Retain-Images": "none",
        }
        reply = exchange(
            "POST",
            self.base,
            seconds=seconds,
            max_bytes=MAX_BYTES,
            headers=headers,
            body={"url": url},
            proxy=self.proxy,
        )
        if reply.status != 200:
            if reply.status in (401, 402) or reply.spent:
                raise RefusedError(f"jina refuses: {reply.fault(self.key)}")
            reply.raise_if_passing(self.key)
            # else it is not Jina that answers, and it says nothing about the page
            envelope = reply.text.lstrip().startswith("{")
            raise PageError(reply.fault(self.key)) if envelope else CallError(reply.fault(self.key))
        page = reply.json_object().get("data")
        if not isinstance(page, dict) or not isinstance(page.get("content"), str):
            raise TryError(f"no page in the answer: {reply.fault(self.key)}")
        warning = WARNINGS.search(f"{page.get('warning') or ''}\n{page['content'][:500]}")
        if warning or not page["content"].strip():
            raise PageError(warning[0] if warning else "the page is empty")
        return f"{page.get('title') or ''}\n{page['content']}".strip()


class Fetch:
    """Reads a page directly: no scripts run, and what is not text is no page."""

    def __init__(self, proxy: str | None, allow_private: bool):
        self.proxy, self.allow_private = proxy, allow_private

    def __call__(self, url: str, seconds: float) -> str:
        """One try: the text of the page behind at most MAX_HOPS redirects, each of them checked
        like the first address. PageError as `Jina`.
        """
        due = time.monotonic() + seconds
        for _ in range(MAX_HOPS + 1):
            reply = exchange(
                "GET",
                url,
                seconds=due - time.monotonic(),
                max_bytes=MAX_BYTES,
                headers=AGENT_HEADERS,
                proxy=self.proxy,
                public_only=not self.allow_private,
            )
            if reply.status not in (301, 302, 303, 307, 308) or "Location" not in reply.headers:
                break
            # the bytes were UTF-8
            target = reply.headers["Location"].encode("latin-1").decode("utf-8", "replace")
            url = urljoin(url, target)
        else:
            raise PageError(f"more than {MAX_HOPS} redirects")
        if reply.status != 200:
            reply.raise_if_passing(None)
            raise PageError(f"HTTP {reply.status}")
        return page_text(reply)


def page_text(reply: Reply) -> str:
    """The text of a fetched page; PageError for anything but text, and for a page without any."""
    kind = reply.headers.get("Content-Type", "text/html").lower()
    if not kind.startswith("text/") and not re.match(r"application/(xhtml\+xml|json|xml)", kind):
        raise PageError(f"no text but {kind.partition(';')[0]}")
    named = re.search(rb"charset=[\"']?([\w-]+)", kind.encode() + b"\n" + reply.body[:2048])
    try:
        text = reply.body.decode(named[1].decode() if named else "utf-8", "replace")
    except (LookupError, UnicodeError):  # a charset that nobody knows, or that is none
        text = reply.text
    if "html" in kind:
        reader = _Text()
        reader.feed(text.replace("<![", "&lt;!["))  # html.parser dies of sections it does not know
        reader.close()
        text = "".join(reader.parts)
    text = re.sub(r"\s*\n\s*", "\n", re.sub(r"[^\S\n]+", " ", text)).strip()
    if not text:
        raise PageError("the page is empty")
    return text


class _Text(HTMLParser):
    """Collects what a reader sees."""

    HIDDEN = ("script", "style", "noscript", "template", "svg")
    INLINE = re.compile("a|abbr|b|cite|code|em|font|i|mark|q|s|small|span|strong|sub|sup|u")

    def __init__(self):
        super().__init__()
        self.parts, self.hidden = [], 0

    def handle_starttag(self, tag, attrs):
        self.hidden += tag in self.HIDDEN
        self._break(tag)

    def handle_endtag(self, tag):
        self.hidden -= self.hidden > 0 and tag in self.HIDDEN
        self._break(tag)

    def handle_data(self, data):
        if not self.hidden:
            self.parts.append(data)

    def _break(self, tag):
        if not self.INLINE.fullmatch(tag):
            self.parts.append("\n")
