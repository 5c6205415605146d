"""Lists the repositories, and puts the names of the models into the catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.repository.layout import RepositoryContents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.errors import ServingError
    from kernel.repository.repositories import Repositories
    from kernel.serving.catalog import Catalog


class RepositoryListing:
    """The repositories of a server. All methods raise `InternalError` if a repository cannot be read."""

    def __init__(self, catalog: Catalog, repositories: Repositories) -> None:
        self._catalog = catalog
        self._repositories = repositories

    async def update_names(self) -> tuple[str, ...]:
        """Read the names of the models into the catalog, and return them."""
        known, duplicates = await self._repositories.names()
        self._catalog.set_known(known, duplicates)
        return tuple(known.values())

    async def scan(self, names: Sequence[str] = ("*",)) -> RepositoryContents:
        """List all files, and put the names of the models into the catalog; with `names` the files of these models.

        Then other folders are not read, because a repository may have many files.
        """
        if "*" not in names:
            others = await self.update_names()
            parts = [await self.scan_for(name) for name in names]
            return RepositoryContents(
                models={key: folder for part in parts for key, folder in part.models.items()},
                duplicates={key: paths for part in parts for key, paths in part.duplicates.items()},
                others=others,
                traffic={name: file for part in parts for name, file in part.traffic.items()},
            )
        found = await self._repositories.scan()
        self._set_known(found)
        return found

    async def poll(self) -> tuple[RepositoryContents, ServingError | None]:
        """List all files as `Repositories.poll` does, and put the names of the models into the catalog."""
        found, error = await self._repositories.poll()
        self._set_known(found)
        return found, error

    def _set_known(self, found: RepositoryContents) -> None:
        known = {identifier: folder.name for identifier, folder in found.models.items()}
        self._catalog.set_known(known, found.duplicates)

    async def scan_for(self, name: str) -> RepositoryContents:
        """List the files of the models called `name`."""
        return await self._repositories.scan(name)
