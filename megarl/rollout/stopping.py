"""Where a response ends that is to stop at a text. Tokens are cut, never text: a response ends with the token that completes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MARGIN = 4  # tokens before a window: tokenizers treat the first token of a text, and half a character, differently


class StopText:
    """Watches one response. `decode` turns token ids into text, special tokens included; `seen` tokens were looked at before."""

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str], seen: int = 0):
        self._stop = tuple(text for text in stop if text)
        self._decode = decode
        self._reach = max((len(text.encode()) for text in self._stop), default=0)  # a token is a byte of text or more
        self._seen = seen

    def cut(self, token_ids: Sequence[int]) -> int | None:
        """How many tokens remain of a response that has grown to `token_ids`: up to the first that completes a stop text.

        None while there is none. Only what is new since the last call is looked at.
        """
        if not self._stop:
            return None
        start = max(0, self._seen - self._reach - _MARGIN)
        if not self._found(token_ids[start:]):
            self._seen = len(token_ids)
            return None
        for end in range(self._seen + 1, len(token_ids) + 1):
            if self._found(token_ids[start:end]):
                return end
        return len(token_ids)

    def _found(self, token_ids: Sequence[int]) -> bool:
        text = self._decode(token_ids)
        return any(stop in text for stop in self._stop)
