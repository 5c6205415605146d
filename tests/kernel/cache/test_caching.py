"""What stands for a load of a model in keys: who shares entries with whom."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import msgspec
import pytest

from kernel.cache.caching import ResponseCaching, files_salt
from kernel.cache.local import LocalCache
from kernel.cache.lookup import CacheAccess
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import EnsembleSpec, EnsembleStep
from kernel.serving.catalog import Catalog, ModelState
from kernel.serving.model import Model
from kernel.testing import FakeClock, model_spec
from schedulers.direct import direct
from tests.kernel.cache.caching_bench import FakeHelpers, SlowCache

if TYPE_CHECKING:
    from pathlib import Path


def model(name: str = "m", version: int = 1, config: ModelConfig | None = None, **more: object) -> Model:
    spec = msgspec.structs.replace(model_spec(name), **{"response_cache": True, **more})
    return Model(spec, config or ModelConfig(name=name), version, direct, FakeClock())


def entrance_of(loaded: Model) -> CacheAccess:
    assert isinstance(loaded.entrance, CacheAccess)
    return loaded.entrance


def write(folder: Path, files: dict[str, str], version: int = 1) -> Path:
    for name, text in files.items():
        path = folder / str(version) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, ns=(1, 1))
    return folder


def test_equal_files_and_configurations_have_equal_salts(tmp_path: Path) -> None:
    files = {"model.py": "a", "data/weights": "b"}
    one, other = write(tmp_path / "one", files), write(tmp_path / "other", files)
    assert files_salt(model(), one) == files_salt(model(), other)


@pytest.mark.parametrize("change", ["size", "time", "name", "configuration", "version", "model"])
def test_each_difference_changes_the_salt(change: str, tmp_path: Path) -> None:
    one = write(tmp_path / "one", {"model.py": "a"})
    loaded, folder = model(), one
    match change:
        case "size":
            folder = write(tmp_path / "other", {"model.py": "aa"})
        case "time":
            folder = write(tmp_path / "other", {"model.py": "a"})
            os.utime(folder / "1" / "model.py", ns=(2, 2))
        case "name":
            folder = write(tmp_path / "other", {"model2.py": "a"})
        case "configuration":
            loaded = model(config=ModelConfig(name="m", backend="x"))
        case "version":
            folder, loaded = write(tmp_path / "one", {"model.py": "a"}, 2), model(version=2)
        case "model":
            loaded = model("n", config=ModelConfig(name="m"))
    assert files_salt(loaded, folder) != files_salt(model(), one)


def test_files_that_go_away_and_odd_names_are_no_error(tmp_path: Path) -> None:
    folder = write(tmp_path, {"model.py": "a"})
    (folder / "1" / "broken").symlink_to("nowhere")
    (folder / "1" / os.fsdecode(b"odd\xff")).write_text("")
    assert len(files_salt(model(), folder)) == 16


def caching(catalog: Catalog, *, shared: bool) -> ResponseCaching:
    helpers = FakeHelpers()
    cache = SlowCache() if shared else LocalCache(1 << 20)
    return ResponseCaching(cache, catalog, helpers=helpers, regions=helpers, clock=FakeClock())


def test_in_a_shared_cache_servers_with_the_same_files_share_entries(tmp_path: Path) -> None:
    async def main() -> None:
        salts = []
        for _ in range(2):
            loaded = model()
            await caching(Catalog(), shared=True).extend(loaded, tmp_path)
            salts.append(loaded.cache_salt)
        assert salts[0] == salts[1]

    asyncio.run(main())


@pytest.mark.parametrize("shared", [False, True])
def test_a_model_that_is_loaded_again_has_entries_of_its_own(tmp_path: Path, shared: bool) -> None:
    async def main() -> None:
        server = caching(Catalog(), shared=shared)
        salts = []
        for _ in range(3):
            loaded = model()
            await server.extend(loaded, tmp_path)
            salts.append(loaded.cache_salt)
        assert len(set(salts)) == 3

    asyncio.run(main())


def ensemble(step: str, name: str = "e") -> Model:
    return model(name, ensemble=EnsembleSpec((EnsembleStep(step, "", {}, {}),)))


def test_an_ensemble_has_other_entries_after_a_step_was_loaded_again(tmp_path: Path) -> None:
    async def main() -> None:
        catalog = Catalog()
        server = caching(catalog, shared=False)
        loaded = {"inner": ensemble("m", "inner"), "e": ensemble("inner")}
        for name, each in loaded.items():
            await server.extend(each, tmp_path)
            catalog.set_state(name, 1, ModelState.READY, "", each)
        salt = entrance_of(loaded["e"]).salt
        assert salt() is None, "a step is missing: the ensemble says so itself"
        salts = []
        for _ in range(2):
            step = model(response_cache=False)
            await server.extend(step, tmp_path)
            catalog.set_state("m", 1, ModelState.READY, "", step)
            salts.append(salt())
            assert salt() == salts[-1]
        assert len({*salts, None}) == 3

    asyncio.run(main())


def test_an_ensemble_of_itself_ends(tmp_path: Path) -> None:
    async def main() -> None:
        catalog = Catalog()
        server = caching(catalog, shared=False)
        loaded = ensemble("e")
        await server.extend(loaded, tmp_path)
        catalog.set_state("e", 1, ModelState.READY, "", loaded)
        assert len(entrance_of(loaded).salt() or b"") == 16

    asyncio.run(main())
