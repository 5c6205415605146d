"""The entrance of a model version with a response cache: requests go to the cache first, then to the model's queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.cache.lookup import Lookup

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from kernel.cache.interface import ResponseCache
    from kernel.loop.clock import Clock
    from kernel.serving.helper_tasks import Helpers, RegionAccess
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from kernel.serving.response import Response

#: Requests with more bytes of inputs are not looked up: hashing takes about 1 ms for each MiB.
MAX_INPUT_BYTE_SIZE = 64 << 20


class CacheAccess:
    """Looks requests up before the model gets them. Implements `kernel.serving.model.Entrance`."""

    def __init__(
        self,
        model: Model,
        cache: ResponseCache,
        salt: Callable[[], bytes | None],
        *,
        helpers: Helpers,
        regions: RegionAccess,
        start: Callable[[Coroutine[Any, Any, None]], None],
        clock: Clock,
    ) -> None:
        """`salt` returns what identifies the present load of the model in keys; None if no request may be looked up.

        `start` runs a coroutine in a task.
        """
        self.model = model
        self.cache = cache
        self.helpers = helpers
        self.regions = regions
        self.start = start
        self.clock = clock
        self.salt = salt
        #: The datatypes of the model's outputs, by name.
        self.datatypes = {name: output.datatype for name, output in model.spec.outputs.items()}

    def submit(self, request: Request) -> None:
        """Respond to a checked request from the cache, or queue it; own it from now on. Raises `ServingError`."""
        salt = self.salt()
        if salt is None or not _can_be_cached(request):
            self.model.submit(request)
        else:
            Lookup(self, request, salt).begin()

    def hold(self, response: Response) -> None:
        """A final response is kept back: the model version is in use until `let_go`."""
        self.model.live.at_cache.add(response)

    def let_go(self, response: Response) -> None:
        """See `hold`."""
        self.model.left_cache(response)


def _can_be_cached(request: Request) -> bool:
    """Whether a response of the cache can be the response of this request."""
    if sum(each.byte_size for each in request.inputs) > MAX_INPUT_BYTE_SIZE:
        return False
    if request.outputs and any(each.span is not None for each in request.outputs):
        # An output that is named twice, with a region, could be either of two in the response.
        names = [each.name for each in request.outputs]
        return len(set(names)) == len(names)
    return True
