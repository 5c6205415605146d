"""The rules that decide which version executes the requests to a model, by the name of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel.serving.catalog import Catalog
    from kernel.serving.front_doors.route import RouteRule


class RouteRules:
    """Set by what knows rules, such as `kernel.traffic.control.Traffic`, and read by the kernel for each request."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        #: Only the models that have a rule.
        self.by_name: dict[str, RouteRule] = {}

    def set(self, name: str, rule: RouteRule | None) -> None:
        """Let `rule` decide which version executes the requests for the model `name`; None ends that."""
        if rule is None:
            self.by_name.pop(name, None)
        else:
            self.by_name[name] = rule
        self.catalog.generation += 1  # routes that front doors know have the former rule
