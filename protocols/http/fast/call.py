"""An inference request of the fast path: its response becomes bytes, without a task or a request of aiohttp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.serving.response import Response
from protocols.body_sizes import COPIED_RESPONSE_BYTE_SIZE
from protocols.http.fast.response_bytes import ResponseBytes, response_head
from protocols.http.inference.call import HttpInferCall

if TYPE_CHECKING:
    from protocols.http.inference.response import HttpResponse


class FastCall(HttpInferCall):
    """A call whose response its connection writes."""

    response: ResponseBytes | None = None

    def send(self, response: Response) -> None:
        decoded, waiter = self.decoded, self.waiter
        if (
            decoded is not None
            and (template := decoded.template) is not None
            and response.final
            and response.error is None
            and waiter is not None
            and self._only is None
        ):
            # Nearly every response goes this way, which does what `finish` does, without its calls.
            octets = template.fill_in(response, self.intake.now_s)
            if octets is not None:
                if response.leased:
                    response.release()
                self.response, self.request = ResponseBytes(octets), None
                waiter.response_ready()
                return
        HttpInferCall.send(self, response)

    def finish(self, response: HttpResponse) -> None:
        byte_size = sum(map(len, response.body))
        head = response_head(response, byte_size, self.head.response_headers)
        source = response.source
        if source is not None and byte_size >= COPIED_RESPONSE_BYTE_SIZE:
            self.response = ResponseBytes(head, response.body, source.release, response.status)
        else:
            self.response = ResponseBytes(b"".join((head, *response.body)), [], None, response.status)
            if source is not None:
                template = None if self.decoded is None or self._only is not None else self.decoded.template
                if template is not None and type(source) is Response:
                    template.remember(source, response.body, head, self.intake.now_s)
                source.release()
        self._left()

    def cancel(self) -> None:
        HttpInferCall.cancel(self)
        response, self.response = self.response, None
        if response is not None and response.release is not None:  # it has waited for the responses before it
            response.release()
